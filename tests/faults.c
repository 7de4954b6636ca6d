/* Let the Nth write or rename under a folder fail, in all processes that share a control file. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

struct control {
  long armed, count, at, mode; /* mode: 0 counts, 1 a full disk, 2 one I/O error, 3 kills */
  char root[4064];
};
static struct control *ctl;

__attribute__((constructor)) static void begin(void) {
  const char *file = getenv("FAULTS");
  int fd = file ? open(file, O_RDWR) : -1;
  if (fd < 0) return;
  ctl = mmap(NULL, sizeof *ctl, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (ctl == MAP_FAILED) ctl = NULL;
  close(fd);
}

static int below(const char *path) {
  size_t n = strlen(ctl->root);
  return strncmp(path, ctl->root, n) == 0 && path[n] == '/';
}

static int watched(int fd) {
  char link[64], path[4096];
  if (!ctl || !ctl->armed) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n <= 0) return 0;
  path[n] = 0;
  return below(path);
}

/* 0: go on; 1: fail for the first time; 2: fail again. A full disk stays full. */
static int fails(void) {
  long n = __atomic_add_fetch(&ctl->count, 1, __ATOMIC_SEQ_CST);
  if (ctl->mode == 0 || n < ctl->at || (ctl->mode != 1 && n > ctl->at)) return 0;
  return n == ctl->at ? 1 : 2;
}

static void end(void) {
  if (ctl->mode == 3) kill(0, SIGKILL);
  errno = ctl->mode == 1 ? ENOSPC : EIO;
}

#define REAL(name, type) static type real; if (!real) real = (type)dlsym(RTLD_NEXT, name)

typedef ssize_t (*write_t)(int, const void *, size_t);
ssize_t write(int fd, const void *data, size_t n) {
  REAL("write", write_t);
  int failed = n && watched(fd) ? fails() : 0;
  if (!failed) return real(fd, data, n);
  if (failed == 1 && ctl->mode != 2 && n > 1) { /* what fits is written */
    ssize_t some = real(fd, data, n / 2);
    if (ctl->mode == 1) return some;
  }
  end();
  return -1;
}

typedef ssize_t (*pwrite_t)(int, const void *, size_t, off_t);
static ssize_t pwrite_(const char *name, int fd, const void *data, size_t n, off_t at) {
  REAL(name, pwrite_t);
  if (n && watched(fd) && fails()) { end(); return -1; }
  return real(fd, data, n, at);
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) { return pwrite_("pwrite", fd, data, n, at); }
ssize_t pwrite64(int fd, const void *data, size_t n, off_t at) { return pwrite_("pwrite64", fd, data, n, at); }

typedef ssize_t (*writev_t)(int, const struct iovec *, int);
ssize_t writev(int fd, const struct iovec *data, int n) {
  REAL("writev", writev_t);
  if (watched(fd) && fails()) { end(); return -1; }
  return real(fd, data, n);
}

typedef ssize_t (*sendfile_t)(int, int, off_t *, size_t);
ssize_t sendfile(int to, int from, off_t *at, size_t n) {
  REAL("sendfile", sendfile_t);
  if (watched(to) && fails()) { end(); return -1; }
  return real(to, from, at, n);
}
ssize_t sendfile64(int to, int from, off_t *at, size_t n) { return sendfile(to, from, at, n); }

typedef int (*rename_t)(const char *, const char *);
int rename(const char *from, const char *to) {
  REAL("rename", rename_t);
  char path[4096];
  if (ctl && ctl->armed && to[0] != '/' && getcwd(path, sizeof path - strlen(to) - 2))
    strcat(strcat(path, "/"), to);
  else
    snprintf(path, sizeof path, "%s", to);
  /* A full disk can rename, but the Nth operation fails whatever it is. */
  if (ctl && ctl->armed && below(path) && fails() == 1) { end(); return -1; }
  return real(from, to);
}
