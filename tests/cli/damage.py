"""Damage files: random bytes, and random edits of files that are valid."""

import json

import yaml

#: Values that no file should hold where another one is expected.
VALUES = (
    None, True, 0, -1, 1.7, 1e308, 10**23, float("nan"), "", "x" * 300, "\x1b[31mred\x9b2J",
    "\ud800", "../../outside", [], [None], {}, {"a": {}}, [[[[[[1]]]]]], "a\x00b", ["a", 1],
)  # fmt: skip


def damaged(data, name, random):
    """Return the bytes of a file after one to three edits that suit it."""
    edits = [_random_bytes, _flip, _cut, _remove, _repeat]
    if name.endswith((".json", ".jsonl", ".log", ".yaml", ".safetensors")):
        edits += [_edit_values] * 8
    for _ in range(random.choice((1, 1, 2, 3))):
        data = random.choice(edits)(data, name, random)
    return data


def _random_bytes(data, name, random):
    return random.randbytes(random.randrange(200))


def _flip(data, name, random):
    changed = bytearray(data)
    for _ in range(random.randrange(1, 6) if data else 0):
        changed[random.randrange(min(len(data), 4096))] = random.randrange(256)
    return bytes(changed)


def _cut(data, name, random):
    return data[: random.randrange(len(data) + 1)]


def _remove(data, name, random):
    begin = random.randrange(len(data) + 1)
    return data[:begin] + data[begin + random.randrange(1, 40) :]


def _repeat(data, name, random):
    begin = random.randrange(len(data) + 1)
    return data[:begin] + data[begin : begin + 30] * random.randrange(2, 50) + data[begin:]


def _edit_values(data, name, random):
    """Change a value of a JSON or YAML file, of a line, or of the header of safetensors."""
    try:
        if name.endswith(".safetensors"):
            length = int.from_bytes(data[:8], "little")
            header = _json(_edited(json.loads(data[8 : 8 + length]), random))
            return len(header).to_bytes(8, "little") + header + data[8 + length :]
        if name.endswith((".jsonl", ".log")):
            lines = data.split(b"\n")
            number = random.randrange(len(lines))
            lines[number] = _json(_edited(json.loads(lines[number]), random))
            return b"\n".join(lines)
        if name.endswith(".yaml"):
            return yaml.safe_dump(_edited(yaml.safe_load(data), random)).encode()
        return _json(_edited(json.loads(data), random))
    except (ValueError, RecursionError, MemoryError, yaml.YAMLError):  # it is damaged already
        return _flip(data, name, random)


def _json(value):
    return json.dumps(value).encode()


def _edited(value, random):
    """Replace, remove, add or rename one value, at any depth."""
    where = value
    while isinstance(where, dict | list) and where:
        keys = list(where) if isinstance(where, dict) else range(len(where))
        key = random.choice(keys)
        if isinstance(where[key], dict | list) and where[key] and random.random() < 0.7:
            where = where[key]
            continue
        action = random.choice(("replace", "replace", "replace", "remove", "add", "swap"))
        if action == "remove":
            del where[key]
        elif action == "add" and isinstance(where, dict):
            where[str(random.choice(VALUES))] = random.choice(VALUES)
        elif action == "swap":
            other = random.choice(list(keys))
            where[key], where[other] = where[other], where[key]
        else:
            where[key] = random.choice(VALUES)
        return value
    return random.choice(VALUES)
