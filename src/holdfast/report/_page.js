"use strict";
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const probe = document.body.appendChild(document.createElement("i"));
  probe.hidden = true;

  const color = (name) => {
    probe.style.color = name;
    return getComputedStyle(probe).color;
  };
  // Only under a key that speaks of colour: a task may be called "var(--ink)".
  const resolve = (value, key = "") => {
    if (Array.isArray(value)) return value.map((item) => resolve(item, key));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, resolve(v, k)]));
    const named = /color(scale)?$/.test(key) && /^var\(--[a-z0-9-]+\)$/.test(value);
    return named ? color(value) : value;
  };

  const touch = matchMedia("(pointer: coarse)").matches;
  const config = { responsive: true, displaylogo: false, displayModeBar: false };
  const narrow = matchMedia("(max-width: 760px)");
  const draw = () => {
    for (const [id, figure] of Object.entries(figures)) {
      const { data, layout } = resolve((narrow.matches && figure.narrow) || figure);
      Plotly.react(id, data, { ...layout, dragmode: touch ? false : "zoom" }, config);
    }
  };

  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const choose = (theme) => {
    root.dataset.theme = theme;
    draw();
  };
  document.getElementById("theme").addEventListener("click", () => choose(isDark() ? "light" : "dark"));
  system.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
  const asked = location.hash.slice(1);
  if (asked === "dark" || asked === "light") root.dataset.theme = asked;

  const download = document.getElementById("download");
  download.addEventListener("click", () => {
    const text = document.getElementById("report").textContent;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    link.download = download.dataset.name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });

  root.classList.add("live");
  draw();
})();
