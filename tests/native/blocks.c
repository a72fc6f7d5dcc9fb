// Native code for the tests: blocks a stream, or a thread outside of any device call.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

void block_until(void* flag) {
  const struct timespec pause = {0, 1000000};
  while (!__atomic_load_n((int*)flag, __ATOMIC_ACQUIRE)) nanosleep(&pause, 0);
}

// As a library that knows nothing of Python: called through ctypes.PyDLL it keeps the GIL.
void sleep_until(int* flag) { block_until(flag); }

struct later {
  int socket;
  char* message;
};

static void* send_later_thread(void* argument) {
  struct later* later = argument;
  const struct timespec pause = {0, 300000000};
  nanosleep(&pause, 0);
  send(later->socket, later->message, strlen(later->message), 0);
  free(later->message);
  free(later);
  return 0;
}

// Sends a message a little later without any Python, from a thread that is gone afterwards.
void send_later(int socket, const char* message) {
  struct later* later = malloc(sizeof *later);
  later->socket = socket;
  later->message = strdup(message);
  pthread_t thread;
  pthread_create(&thread, 0, send_later_thread, later);
  pthread_detach(thread);
}
