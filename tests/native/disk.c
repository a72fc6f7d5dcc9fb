// Native code for the tests, to be preloaded: a disk that fails, blocks or loses its power on order.
//
// The calls that change what lies under one folder are counted, and sendmsg and send where that is asked for.
// At the n-th the process is killed, or the call fails, is interrupted, or writes less than it was given.
// What a power failure would leave is kept in a second folder: of each file what was synced last, of each
// folder the names that it had then, both under the number of its inode.
//
// A process whose variables RANK and JITCKPT_RESTART are as DISK_OF says ("0 0"; " " for an agent, which has
// none) arms itself: DISK_STOP is the number, DISK_WHAT what happens, DISK_UNDER the folder. Messages are
// counted from the first call on what lies in that folder on.
//
// Where the variable DISK_BLOCKED names a file, all calls on what lies in the folder that this file is in
// wait for as long as it is there.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))real(#name))
#define FAILS(path) __builtin_expect(comes_to(path), 0)

enum { KILL = -1, SHORT = -2 };  // what happens instead of an errno

static char folder[PATH_MAX], shadow[PATH_MAX];
static long calls, stop_at;
static int kind, with_messages;
static __thread int inside;  // of this library

static void* real(const char* name) {
  void* found = dlsym(RTLD_NEXT, name);
  if (!found) abort();
  return found;
}

// From here on count; at the call with this number, from 1, let `what` happen (an errno, KILL or SHORT).
void disk_arm(const char* under, const char* persistent, long number, int what, int messages) {
  snprintf(folder, sizeof folder, "%s", under);
  snprintf(shadow, sizeof shadow, "%s", persistent);
  calls = 0, stop_at = number, kind = what, with_messages = messages;
}

static const char* variable(const char* name) {
  const char* value = getenv(name);
  return value ? value : "";
}

__attribute__((constructor)) static void arm_by_environment(void) {
  char own[64];
  snprintf(own, sizeof own, "%s %s", variable("RANK"), variable("JITCKPT_RESTART"));
  if (getenv("DISK_STOP") && !strcmp(own, variable("DISK_OF")))
    disk_arm(variable("DISK_UNDER"), "", atol(getenv("DISK_STOP")), atoi(variable("DISK_WHAT")), 1);
}

long disk_disarm(void) {
  folder[0] = 0, with_messages = 0;
  return calls;
}

static int lies_under(const char* top, const char* path) {
  size_t length = strlen(top);
  return length && !strncmp(path, top, length) && (path[length] == '/' || !path[length]);
}

static void absolute(char* result, int at, const char* path) {
  char link[64], base[PATH_MAX] = "";
  if (path && path[0] == '/') {
    snprintf(result, PATH_MAX, "%s", path);
    return;
  }
  snprintf(link, sizeof link, at == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", at);
  ssize_t size = readlink(link, base, sizeof base - 1);
  base[size < 0 ? 0 : size] = 0;
  snprintf(result, PATH_MAX, path && *path ? "%.2000s/%.2000s" : "%s", base, path);
}

static void wait_while_blocked(const char* path) {
  static char flag[PATH_MAX];
  if (!flag[0]) snprintf(flag, sizeof flag, "%s", variable("DISK_BLOCKED"));
  char top[PATH_MAX];
  snprintf(top, sizeof top, "%s", flag);
  char* slash = strrchr(top, '/');
  if (!slash) return;
  *slash = 0;
  const struct timespec pause = {0, 5000000};
  while (lies_under(top, path) && strcmp(path, flag) && !faccessat(AT_FDCWD, flag, F_OK, 0))
    nanosleep(&pause, 0);
}

// Whether something happens to this call; errno or the signal says what.
static int happens(void) {
  if (__atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED) != stop_at) return 0;
  if (kind == KILL) raise(SIGKILL);
  errno = kind;
  return kind != SHORT;
}

static int comes_to_at(int at, const char* path) {
  if (inside) return 0;
  char whole[PATH_MAX];
  int before = errno;
  inside = 1;
  absolute(whole, at, path);
  wait_while_blocked(whole);
  inside = 0;
  errno = before;
  return lies_under(folder, whole) && happens();
}

static void comes_to_see(int at, const char* path) {
  char whole[PATH_MAX];
  if (inside) return;
  inside = 1;
  absolute(whole, at, path);
  wait_while_blocked(whole);
  inside = 0;
}

static int comes_to(const char* path) { return comes_to_at(AT_FDCWD, path); }

// What a power failure leaves.

static void shadow_of(char* result, ino_t inode, const char* what) {
  snprintf(result, PATH_MAX, "%.3000s/%lu.%s", shadow, (unsigned long)inode, what);
}

static void forget(int descriptor, const char* what) {
  struct stat status;
  char path[PATH_MAX];
  if (!shadow[0] || fstat(descriptor, &status)) return;
  shadow_of(path, status.st_ino, what);
  unlink(path);
}

static void keep_names(int descriptor, FILE* names) {
  DIR* directory = fdopendir(openat(descriptor, ".", O_RDONLY | O_DIRECTORY));
  if (!directory) abort();
  for (struct dirent* one; (one = readdir(directory));) {
    struct stat status;
    if (!strcmp(one->d_name, ".") || !strcmp(one->d_name, "..")) continue;
    if (fstatat(descriptor, one->d_name, &status, AT_SYMLINK_NOFOLLOW)) continue;
    fprintf(names, "%lu %c %s\n", (unsigned long)status.st_ino, S_ISDIR(status.st_mode) ? 'd' : 'f',
            one->d_name);
  }
  closedir(directory);
}

static void keep_content(int descriptor, FILE* copy) {
  char own[64], piece[1 << 16];
  snprintf(own, sizeof own, "/proc/self/fd/%d", descriptor);
  int file = open(own, O_RDONLY);
  if (file < 0) abort();
  for (ssize_t size; (size = read(file, piece, sizeof piece)) > 0;) fwrite(piece, 1, size, copy);
  close(file);
}

static void keep(int descriptor) {
  struct stat status;
  char path[PATH_MAX], whole[PATH_MAX];
  absolute(whole, descriptor, 0);
  if (!shadow[0] || !lies_under(folder, whole) || fstat(descriptor, &status)) return;
  inside = 1;
  shadow_of(path, status.st_ino, S_ISDIR(status.st_mode) ? "names" : "content");
  FILE* file = fopen(path, "w");
  if (!file) abort();
  (S_ISDIR(status.st_mode) ? keep_names : keep_content)(descriptor, file);
  fclose(file);
  inside = 0;
}

// The calls.

static int opened(int descriptor, int flags) {
  if (descriptor >= 0 && (flags & O_CREAT) && !inside) {
    struct stat status;
    inside = 1;
    if (!fstat(descriptor, &status) && !status.st_size) forget(descriptor, "content");
    inside = 0;
  }
  return descriptor;
}

#define OPEN(name)                                                            \
  int name(const char* path, int flags, ...) {                                \
    va_list more;                                                             \
    va_start(more, flags);                                                    \
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0; \
    va_end(more);                                                             \
    if (FAILS(path)) return -1;                                               \
    return opened(REAL(name)(path, flags, mode), flags);                      \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                          \
  int name(int at, const char* path, int flags, ...) {                        \
    va_list more;                                                             \
    va_start(more, flags);                                                    \
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0; \
    va_end(more);                                                             \
    if (comes_to_at(at, path)) return -1;                                     \
    return opened(REAL(name)(at, path, flags, mode), flags);                  \
  }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int descriptor, const void* data, size_t size) {
  long before = calls;
  if (comes_to_at(descriptor, 0)) return -1;
  int is_short = kind == SHORT && before != calls && calls == stop_at && size > 1;
  return REAL(write)(descriptor, data, is_short ? size / 2 : size);
}

int fsync(int descriptor) {
  if (comes_to_at(descriptor, 0)) return -1;
  int result = REAL(fsync)(descriptor);
  if (!result && !inside) keep(descriptor);
  return result;
}

int mkdir(const char* path, mode_t mode) {
  if (FAILS(path)) return -1;
  int result = REAL(mkdir)(path, mode);
  if (!result && lies_under(folder, path)) {
    inside = 1;
    int made = open(path, O_RDONLY | O_DIRECTORY);
    forget(made, "names");
    close(made);
    inside = 0;
  }
  return result;
}

// These change nothing, and wait like all others.
#define LOOK(name, type)                            \
  int name(const char* path, struct type* status) { \
    comes_to_see(AT_FDCWD, path);                   \
    return REAL(name)(path, status);                \
  }
LOOK(stat, stat)
LOOK(stat64, stat64)
LOOK(lstat, stat)
LOOK(lstat64, stat64)

int rename(const char* from, const char* to) { return FAILS(to) ? -1 : REAL(rename)(from, to); }

int renameat2(int from_at, const char* from, int to_at, const char* to, unsigned flags) {
  if (comes_to_at(to_at, to)) return -1;
  if (getenv("DISK_CANNOT_EXCHANGE")) return errno = EINVAL, -1;
  return REAL(renameat2)(from_at, from, to_at, to, flags);
}

int link(const char* from, const char* to) { return FAILS(to) ? -1 : REAL(link)(from, to); }
int unlink(const char* path) { return FAILS(path) ? -1 : REAL(unlink)(path); }
int rmdir(const char* path) { return FAILS(path) ? -1 : REAL(rmdir)(path); }

int unlinkat(int at, const char* path, int flags) {
  return comes_to_at(at, path) ? -1 : REAL(unlinkat)(at, path, flags);
}

static int comes_to_message(void) { return with_messages && calls && !inside && happens(); }

ssize_t sendmsg(int socket, const struct msghdr* message, int flags) {
  return comes_to_message() ? -1 : REAL(sendmsg)(socket, message, flags);
}

ssize_t send(int socket, const void* data, size_t size, int flags) {
  return comes_to_message() ? -1 : REAL(send)(socket, data, size, flags);
}
