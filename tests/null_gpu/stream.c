/* Streams run what is queued in order and apart from the host; kernels are counted and take no time, but on a slow GPU. */
#include "null_gpu.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct Stream {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  Op *first, **last; /* without the one that runs */
  int queued;        /* with it */
  bool threaded;
  int device, priority;
  Stream *next;
};
static Stream *all_streams, *defaults[DEVICES];
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;

static Stream *made(int priority) {
  Stream *stream = calloc(1, sizeof *stream);
  if (!stream) abort();
  pthread_mutex_init(&stream->lock, NULL);
  pthread_cond_init(&stream->changed, NULL);
  stream->last = &stream->first;
  stream->device = physical_device();
  stream->priority = priority;
  pthread_mutex_lock(&list_lock);
  stream->next = all_streams;
  all_streams = stream;
  pthread_mutex_unlock(&list_lock);
  return stream;
}

/* NULL and the handles 1 and 2 mean the default stream. */
static Stream *real(Stream *stream) {
  if ((uintptr_t)stream > 2) return stream;
  Stream **place = &defaults[physical_device()];
  if (!*place) *place = made(0);
  return *place;
}
int device_of(Stream *stream) { return real(stream)->device; }

static void wait_while_stalled(int device) {
  while (device_state(device)->stalled && !device_state(device)->fault) usleep(1000);
}

static void *worker(void *argument) {
  Stream *stream = argument;
  pthread_setname_np(pthread_self(), "null GPU"); /* not that of the thread of torch that has queued first */
  pthread_mutex_lock(&stream->lock);
  for (;;) {
    while (!stream->first) pthread_cond_wait(&stream->changed, &stream->lock);
    Op *op = stream->first;
    if (!(stream->first = op->next)) stream->last = &stream->first;
    pthread_mutex_unlock(&stream->lock);
    /* Of GPUs that have all reached a collective nobody could tell which one is stuck. */
    if (!op->collective) wait_while_stalled(stream->device);
    op->run(op);
    free(op);
    pthread_mutex_lock(&stream->lock);
    __atomic_sub_fetch(&stream->queued, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&stream->changed);
  }
  return NULL;
}

void submit(Stream *stream, Op op, bool blocking) {
  stream = real(stream);
  pthread_mutex_lock(&stream->lock);
  if (!blocking && !stream->queued && !device_state(stream->device)->stalled) {
    op.run(&op);
    pthread_mutex_unlock(&stream->lock);
    return;
  }
  Op *queued = malloc(sizeof op);
  if (!queued) abort();
  *queued = op;
  queued->next = NULL;
  *stream->last = queued;
  stream->last = &queued->next;
  __atomic_add_fetch(&stream->queued, 1, __ATOMIC_RELAXED);
  if (!stream->threaded) {
    pthread_t thread;
    stream->threaded = true;
    if (pthread_create(&thread, NULL, worker, stream)) abort();
    pthread_detach(thread);
  }
  pthread_cond_broadcast(&stream->changed);
  pthread_mutex_unlock(&stream->lock);
}

/* A host thread that waits for a GPU keeps its core, as in CUDA; on the busy cores of most tests it sleeps. */
static bool spins(void) { return setting("NULL_GPU_SPINS", 0) != 0; }
static bool is_idle(const Stream *stream) { return !__atomic_load_n(&stream->queued, __ATOMIC_ACQUIRE); }

/* Returns when nothing is queued, or with the device's fault. */
static int drain(Stream *stream) {
  for (bool spinning = spins(); spinning && !is_idle(stream) && !device_state(stream->device)->fault;) sched_yield();
  pthread_mutex_lock(&stream->lock);
  while (!is_idle(stream) && !device_state(stream->device)->fault) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    if ((until.tv_nsec += 10000000) >= 1000000000) until.tv_nsec -= 1000000000, until.tv_sec++;
    pthread_cond_timedwait(&stream->changed, &stream->lock, &until);
  }
  pthread_mutex_unlock(&stream->lock);
  return device_state(stream->device)->fault;
}

int cudaStreamCreateWithPriority(Stream **out, unsigned flags, int priority) {
  use_device();
  return (void)flags, *out = made(priority), fault();
}
int cudaStreamCreateWithFlags(Stream **out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
int cudaStreamCreate(Stream **out) { return cudaStreamCreateWithPriority(out, 0, 0); }
int cudaStreamDestroy(Stream *stream) { return drain(real(stream)); } /* its memory stays: a late call may name it */
int cudaStreamGetPriority(Stream *stream, int *priority) { return *priority = real(stream)->priority, SUCCESS; }
int cudaStreamSynchronize(Stream *stream) {
  COUNT("SYNC stream");
  return drain(real(stream));
}
int cuStreamSynchronize(Stream *stream) { return cudaStreamSynchronize(stream); }
int cudaDeviceSynchronize(void) {
  COUNT("SYNC device");
  use_device();
  for (Stream *stream = all_streams; stream; stream = stream->next)
    if (stream->device == physical_device() && drain(stream)) break;
  return fault();
}
int cuCtxSynchronize(void) { return cudaDeviceSynchronize(); }
int cudaStreamQuery(Stream *stream) {
  return fault() ? fault() : is_idle(real(stream)) ? SUCCESS : NOT_READY;
}
int cudaStreamIsCapturing(Stream *stream, int *status) { return (void)stream, *status = 0, SUCCESS; }
int cudaStreamGetCaptureInfo(Stream *stream, int *status, unsigned long long *id, void *g, void *d, void *e, void *n) {
  (void)stream, (void)g, (void)d, (void)e, (void)n;
  if (id) *id = 0;
  return *status = 0, SUCCESS;
}
int cudaThreadExchangeStreamCaptureMode(int *mode) { return (void)mode, SUCCESS; }

static void do_call(const Op *op) { ((void (*)(void *))op->to)(op->owner); }
int cudaLaunchHostFunc(Stream *stream, void (*function)(void *), void *data) {
  return submit(stream, (Op){.run = do_call, .to = (void *)function, .owner = data}, false), fault();
}

/* ---- events: recorded again and again; a wait is for the newest record at the time of its call ---- */
typedef struct {
  volatile uint64_t issued, completed;
  double at; /* seconds, of the newest completed record */
  int device;
} Event;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}
static void do_record(const Op *op) {
  Event *event = op->owner;
  event->at = now();
  __atomic_store_n(&event->completed, op->bytes, __ATOMIC_RELEASE);
}
static bool is_complete(const Event *event, uint64_t record) { return __atomic_load_n(&event->completed, __ATOMIC_ACQUIRE) >= record; }
static int wait_for(const Event *event, uint64_t record, bool spinning) {
  while (!is_complete(event, record) && !device_state(event->device)->fault)
    if (spinning) sched_yield();
    else usleep(50);
  return device_state(event->device)->fault;
}
static void do_wait(const Op *op) { wait_for(op->owner, op->bytes, false); }

int cudaEventCreateWithFlags(Event **out, unsigned flags) {
  COUNT("cudaEventCreate");
  (void)flags;
  use_device();
  if (!(*out = calloc(1, sizeof **out))) abort();
  return (*out)->device = physical_device(), fault();
}
int cudaEventCreate(Event **out) { return cudaEventCreateWithFlags(out, 0); }
int cudaEventDestroy(Event *event) { return (void)event, SUCCESS; } /* 32 bytes stay: a queued wait may name it */
int cudaEventRecord(Event *event, Stream *stream) {
  COUNT("cudaEventRecord");
  event->device = device_of(stream);
  return submit(stream, (Op){.run = do_record, .owner = event, .bytes = ++event->issued}, false), fault();
}
int cudaEventRecordWithFlags(Event *event, Stream *stream, unsigned flags) { return (void)flags, cudaEventRecord(event, stream); }
int cudaEventQuery(Event *event) {
  return device_state(event->device)->fault ? device_state(event->device)->fault : is_complete(event, event->issued) ? SUCCESS : NOT_READY;
}
int cudaEventSynchronize(Event *event) {
  COUNT("SYNC event");
  return wait_for(event, event->issued, spins());
}
int cudaStreamWaitEvent(Stream *stream, Event *event, unsigned flags) {
  COUNT("cudaStreamWaitEvent");
  (void)flags;
  if (!is_complete(event, event->issued)) submit(stream, (Op){.run = do_wait, .owner = event, .bytes = event->issued}, true);
  return fault();
}
int cudaEventElapsedTime(float *ms, const Event *first, const Event *second) {
  if (!is_complete(first, first->issued) || !is_complete(second, second->issued)) return NOT_READY;
  return *ms = (float)((second->at - first->at) * 1e3), fault();
}

/* ---- kernels ---- */
typedef struct {
  size_t shared, constant, local;
  int threads, registers, ptx, binary, cache, dynamic, carveout;
} FunctionAttributes;

typedef struct {
  unsigned x, y, z;
} Size;
typedef struct {
  Size grid, block;
  size_t shared;
  Stream *stream;
} Launch; /* the beginning of cudaLaunchConfig_t */

static void do_kernel(const Op *op) {
  double end = now() + (double)op->bytes * 1e-6;
  if (op->bytes >= 1000) usleep((useconds_t)op->bytes);
  while (now() < end); /* a short sleep would take the time that busy cores need to wake a thread */
}
static int launch(Stream *stream) {
  COUNT("LAUNCH kernel");
  int32_t us = device_state(device_of(stream))->slow_us;
  if (us) submit(stream, (Op){.run = do_kernel, .bytes = (size_t)us}, true);
  return fault();
}
int cudaLaunchKernel(const void *function, Size grid, Size block, void **arguments, size_t shared, Stream *stream) {
  return (void)function, (void)grid, (void)block, (void)arguments, (void)shared, launch(stream);
}
int __cudaLaunchKernel(const void *kernel, Size grid, Size block, void **arguments, size_t shared, Stream *stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
int cudaLaunchKernelExC(const Launch *how, const void *function, void **arguments) { return (void)function, (void)arguments, launch(how->stream); }
int cuLaunchKernel(void) {
  COUNT("LAUNCH triton");
  return fault();
}
int cuLaunchKernelEx(void) { return cuLaunchKernel(); }
int cuStreamWriteValue32(void) { return fault(); }
int __cudaGetKernel(void **out, const void *function) { return *out = (void *)function, SUCCESS; }
int cudaFuncGetAttributes(FunctionAttributes *out, const void *function) {
  (void)function;
  int version = (int)(setting("NULL_GPU_CAPABILITY", 9.0) * 10 + 0.5), known[] = {120, 100, 90, 86, 80, 75, 70}, i = 0;
  while (i < 6 && known[i] > version) i++; /* the newest binary in the wheel that this GPU can run */
  *out = (FunctionAttributes){.threads = 1024, .registers = 64, .ptx = known[i], .binary = known[i], .dynamic = 49152};
  return fault();
}
int cudaFuncSetAttribute(const void *function, int attribute, int value) { return (void)function, (void)attribute, (void)value, SUCCESS; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned flags) {
  return (void)f, (void)b, (void)s, (void)flags, *n = 2, SUCCESS;
}
int cudaGetSymbolAddress(void **out, const void *symbol) {
  static char variables[1 << 20];
  return (void)symbol, *out = variables, SUCCESS;
}

/* ---- cuBLAS: a product is a launch ---- */
static char handle[4096];
static int product(void) {
  COUNT("LAUNCH product");
  return fault() ? 13 /* CUBLAS_STATUS_EXECUTION_FAILED */ : SUCCESS;
}
int cublasCreate_v2(void **out) { return *out = handle, fault() ? 1 : SUCCESS; }
int cublasGetMathMode(void *h, int *mode) { return (void)h, *mode = 0, SUCCESS; }
int cublasGetPointerMode_v2(void *h, int *mode) { return (void)h, *mode = 0, SUCCESS; }
size_t cublasLtGetVersion(void) { return 130100; }
int cublasGemmEx(void) { return product(); }
int cublasSgemm_v2(void) { return product(); }
int cublasGemmStridedBatchedEx(void) { return product(); }
int cublasSgemmStridedBatched(void) { return product(); }
int cublasLtMatmul(void) { return product(); }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *o, void *a, void *b, void *c, void *d, void *p, int wanted, char *result, int *found) {
  (void)h, (void)o, (void)a, (void)b, (void)c, (void)d, (void)p, (void)wanted;
  return memset(result, 0, 96), *found = 1, SUCCESS; /* sizeof(cublasLtMatmulHeuristicResult_t) */
}
static int described(void **out) { return (*out = calloc(1, 256)) ? SUCCESS : 3; }
int cublasLtMatmulDescCreate(void **out) { return described(out); }
int cublasLtMatrixLayoutCreate(void **out) { return described(out); }
int cublasLtMatmulPreferenceCreate(void **out) { return described(out); }
