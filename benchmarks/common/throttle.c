// Makes a fast network slow: a process that preloads this sends at most THROTTLE_GBPS Gbit/s through NCCL's sockets.
//
//     cc -O2 -shared -fPIC -o throttle.so throttle.c -ldl
//     THROTTLE_GBPS=1 LD_PRELOAD=./throttle.so python ...
//
// NCCL uses non-blocking send() and retries on EAGAIN, so to it an empty token bucket looks like a full socket buffer.
// The bucket holds 5 ms' worth of bytes, so less than 0.03 Gbit/s would never send. Other traffic is left alone.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double rate, tokens, filled;  // bytes a second, bytes, and when, in seconds
static ssize_t (*real_send)(int, const void *, size_t, int);

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

__attribute__((constructor)) static void start(void) {
  const char *gbps = getenv("THROTTLE_GBPS");
  rate = gbps ? atof(gbps) * 1e9 / 8 : 0;
  filled = now();
  real_send = (ssize_t(*)(int, const void *, size_t, int))dlsym(RTLD_NEXT, "send");
}

ssize_t send(int fd, const void *data, size_t size, int flags) {
  if (rate <= 0 || !(flags & MSG_DONTWAIT)) return real_send(fd, data, size, flags);
  pthread_mutex_lock(&lock);
  double at = now(), most = rate * 5e-3;
  tokens += (at - filled) * rate;
  if (tokens > most) tokens = most;
  filled = at;
  size_t allowed = tokens > 0 ? (size_t)tokens : 0;
  // No slivers: each would cost a packet.
  if (allowed < size && allowed < 16384) {
    pthread_mutex_unlock(&lock);
    errno = EAGAIN;
    return -1;
  }
  ssize_t sent = real_send(fd, data, size < allowed ? size : allowed, flags);
  if (sent > 0) tokens -= sent;
  pthread_mutex_unlock(&lock);
  return sent;
}
