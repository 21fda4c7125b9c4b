// Makes a fast network slow: a process that preloads this sends at most THROTTLE_GBPS Gbit/s to other nodes.
//
//     cc -O2 -shared -fPIC -o throttle.so throttle.c -ldl
//     THROTTLE_GBPS=1 LD_PRELOAD=./throttle.so python ...
//
// NCCL uses sockets between nodes only, and it alone calls send() with MSG_DONTWAIT. gloo uses sockets between all
// ranks, with writev(). With THROTTLE_RANKS_PER_NODE, a rank of torchrun's (RANK) has the loopback address 127.77.0.k of
// its node k where gloo asks for 127.0.0.1 (GLOO_SOCKET_IFNAME=lo), so that each side of a connection sees the other's
// node, and only what goes to another one is throttled.
//
// Both retry on EAGAIN, so to them an empty bucket looks like a full socket buffer. The bucket holds 5 ms' worth of
// bytes, so less than 0.03 Gbit/s would never send. With THROTTLE_BUCKETS, a file of 16 zero bytes a node, the ranks of
// a node share the one of their node, as they would share its network card, and the second half counts the bytes sent.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define NODES_NETWORK 0x7f4d0000u  // 127.77.0.0/16
#define DEPTH 5000000              // ns, of the bucket
#define LEAST 16384                // bytes; slivers would cost a packet each
#define NAP 200000                 // ns; gloo asks again at once

// A token bucket as the time at which it will be full: it survives any number of processes without a lock.
typedef struct {
  _Atomic int64_t full;
  _Atomic uint64_t sent;
} Bucket;

static Bucket own, *bucket = &own;
static double rate;  // bytes a ns
static uint32_t address;  // of this node, in host order; 0 without nodes on loopback
static ssize_t (*real_send)(int, const void *, size_t, int);
static ssize_t (*real_writev)(int, const struct iovec *, int);
static int (*real_bind)(int, const struct sockaddr *, socklen_t);
static int (*real_connect)(int, const struct sockaddr *, socklen_t);

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void share_bucket(const char *file, int node) {
  size_t size = (node + 1) * sizeof(Bucket);
  int fd = open(file, O_RDWR);
  void *all = fd < 0 ? MAP_FAILED : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (all == MAP_FAILED) abort();  // a link that is not throttled would be a wrong result
  bucket = (Bucket *)all + node;
  close(fd);
}

__attribute__((constructor)) static void start(void) {
  const char *gbps = getenv("THROTTLE_GBPS"), *rank = getenv("RANK");
  const char *of_node = getenv("THROTTLE_RANKS_PER_NODE"), *buckets = getenv("THROTTLE_BUCKETS");
  rate = gbps ? atof(gbps) / 8 : 0;
  real_send = (ssize_t(*)(int, const void *, size_t, int))dlsym(RTLD_NEXT, "send");
  real_writev = (ssize_t(*)(int, const struct iovec *, int))dlsym(RTLD_NEXT, "writev");
  real_bind = (int (*)(int, const struct sockaddr *, socklen_t))dlsym(RTLD_NEXT, "bind");
  real_connect = (int (*)(int, const struct sockaddr *, socklen_t))dlsym(RTLD_NEXT, "connect");
  if (!rank || !of_node) return;
  int node = atoi(rank) / atoi(of_node);
  address = NODES_NETWORK + node + 1;
  if (buckets) share_bucket(buckets, node);
}

// Takes up to `wanted` bytes out of the bucket; 0 if it has too few.
static size_t take(size_t wanted) {
  int64_t full = atomic_load(&bucket->full), at = now();
  for (;;) {
    int64_t from = full > at - DEPTH ? full : at - DEPTH;
    size_t there = (size_t)((at - from) * rate);
    size_t taken = wanted < there ? wanted : there;
    if (from > at || (taken < wanted && taken < LEAST)) return 0;
    if (atomic_compare_exchange_weak(&bucket->full, &full, from + (int64_t)(taken / rate))) return taken;
  }
}

static void settle(size_t taken, ssize_t sent) {
  size_t used = sent > 0 ? (size_t)sent : 0;
  if (used < taken) atomic_fetch_sub(&bucket->full, (int64_t)((taken - used) / rate));
  atomic_fetch_add(&bucket->sent, used);
}

ssize_t send(int fd, const void *data, size_t size, int flags) {
  if (rate <= 0 || !(flags & MSG_DONTWAIT) || !size) return real_send(fd, data, size, flags);
  size_t taken = take(size);
  if (!taken) {
    errno = EAGAIN;
    return -1;
  }
  ssize_t sent = real_send(fd, data, taken, flags);
  settle(taken, sent);
  return sent;
}

static int in_nodes_network(const struct sockaddr *peer) {
  return peer->sa_family == AF_INET &&
         (ntohl(((const struct sockaddr_in *)peer)->sin_addr.s_addr) & 0xffff0000u) == NODES_NETWORK;
}

static int goes_to_another_node(int fd) {
  struct sockaddr_storage peer;
  socklen_t size = sizeof peer;
  if (getpeername(fd, (struct sockaddr *)&peer, &size)) return 0;
  return in_nodes_network((struct sockaddr *)&peer) &&
         ntohl(((struct sockaddr_in *)&peer)->sin_addr.s_addr) != address;
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
  if (rate <= 0 || !address || count > 2 || !goes_to_another_node(fd)) return real_writev(fd, parts, count);
  struct iovec cut[2];
  size_t size = 0;
  for (int i = 0; i < count; i++) size += parts[i].iov_len;
  size_t taken = take(size), left = taken;
  if (!taken && size) {
    nanosleep(&(struct timespec){0, NAP}, NULL);
    errno = EAGAIN;
    return -1;
  }
  for (int i = 0; i < count; i++) {
    cut[i] = parts[i];
    if (cut[i].iov_len > left) cut[i].iov_len = left;
    left -= cut[i].iov_len;
  }
  ssize_t sent = real_writev(fd, cut, count);
  settle(taken, sent);
  return sent;
}

static struct sockaddr_in on_this_node(void) {
  struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(address)};
  return here;
}

int bind(int fd, const struct sockaddr *to, socklen_t size) {
  const struct sockaddr_in *asked = (const struct sockaddr_in *)to;
  struct sockaddr_in here = on_this_node();
  if (address && to->sa_family == AF_INET && ntohl(asked->sin_addr.s_addr) == INADDR_LOOPBACK && !asked->sin_port)
    return real_bind(fd, (struct sockaddr *)&here, sizeof here);
  return real_bind(fd, to, size);
}

int connect(int fd, const struct sockaddr *to, socklen_t size) {
  struct sockaddr_in here = on_this_node();
  if (address && in_nodes_network(to)) real_bind(fd, (struct sockaddr *)&here, sizeof here);
  return real_connect(fd, to, size);
}
