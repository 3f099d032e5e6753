/* A CUDA device that computes nothing; see README.md. */
#pragma once
#define _GNU_SOURCE
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CONTEXT (600ull << 20) /* bytes that a process takes of a GPU before it allocates */
enum { DEVICES = 16, PROCESSES = 32 };
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, NOT_READY = 600 };

/* The file NULL_GPU_STATE, mapped by every process with a null GPU, by the null NVML and by tests. */
typedef struct {
  int32_t pid;
  uint32_t began; /* clock ticks after boot: a later process may have the pid of one that has ended */
} Owner;
typedef struct {
  _Alignas(8) Owner owner; /* changed as one */
  uint64_t bytes;          /* allocated by this process */
} ProcessUse;
typedef struct {
  volatile int32_t fault;   /* CUDA error that every call returns from now on; 0: none */
  volatile int32_t stalled; /* nothing that is queued on a stream ends any more, but a collective that was reached */
  volatile int32_t slow_us; /* what a kernel takes; 0: no time, and it is not queued */
  int32_t unused;
  ProcessUse uses[PROCESSES];
} DeviceState;

Owner this_process(void);
bool lives(Owner owner); /* false also of none */

DeviceState *device_state(int physical);
int physical(int device);   /* the number of a device before CUDA_VISIBLE_DEVICES */
int physical_device(void); /* the current device of this thread, before CUDA_VISIBLE_DEVICES */
int fault(void);           /* of the current device */
double setting(const char *name, double otherwise);
uint64_t total_bytes(void);
void begin_context(int physical); /* of this process on this device */
bool has_context(int physical);
void use_device(void); /* a call that begins a context where this process has none, on the current device */

/* Counts calls, for benchmarks and tests: null_gpu_count() reads, null_gpu_reset() clears. */
long *counter(const char *name);
#define COUNT(name)                                   \
  do {                                                \
    static long *slot_;                               \
    if (!slot_) slot_ = counter(name);                \
    __atomic_add_fetch(slot_, 1, __ATOMIC_RELAXED);   \
  } while (0)

/* One queued operation of a stream. */
typedef struct Op {
  void (*run)(const struct Op *);
  void *to;
  const void *from;
  size_t bytes;
  int kind, type, reduction, root;
  void *owner;
  bool collective;
  struct Op *next;
} Op;
typedef struct Stream Stream;

/* Runs `op` after all that the stream has queued: at once if that is nothing and the operation cannot block. */
void submit(Stream *stream, Op op, bool blocking);
int device_of(Stream *stream);
bool is_pinned(const void *host);
