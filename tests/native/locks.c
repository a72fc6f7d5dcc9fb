// Native code for the tests, to be preloaded: a file system without locks. Each call for one fails with the
// number of an error that the variable NO_LOCKS holds: ENOLCK, as NFS without a lock server gives it, say.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/file.h>

static int refused(void) {
  const char* number = getenv("NO_LOCKS");
  if (number) errno = atoi(number);
  return number != NULL;
}

int flock(int file, int operation) {
  if (operation != LOCK_UN && refused()) return -1;
  return ((int (*)(int, int))dlsym(RTLD_NEXT, "flock"))(file, operation);
}

static int control(const char* name, int file, int command, void* argument) {
  if ((command == F_SETLK || command == F_SETLKW) && refused()) return -1;
  return ((int (*)(int, int, ...))dlsym(RTLD_NEXT, name))(file, command, argument);
}

#define CONTROL(name)                        \
  int name(int file, int command, ...) {     \
    va_list rest;                            \
    va_start(rest, command);                 \
    void* argument = va_arg(rest, void*);    \
    va_end(rest);                            \
    return control(#name, file, command, argument); \
  }

CONTROL(fcntl)
CONTROL(fcntl64)
