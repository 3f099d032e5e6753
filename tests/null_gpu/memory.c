/* Device memory is reserved address space: a size, and pages only where something small is written. */
#include "null_gpu.h"

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { HOST = 1, DEVICE = 2 };
typedef struct {
  char *start;
  size_t bytes;
  int kind, device;
} Block;

static Block blocks[1 << 16];
static int block_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *reserve(size_t bytes, int protection) {
  return mmap(0, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

/* As with CUDA, a process that uses a device has its file open. */
static void open_file(int device) {
  const char *root = getenv("NULL_GPU_ROOT");
  char path[PATH_MAX];
  if (!root) return;
  snprintf(path, sizeof path, "%s/dev/nvidia%d", root, device);
  if (open(path, O_RDONLY | O_CLOEXEC) < 0) abort();
}

/* Of this process; NULL: it has no context there. */
static ProcessUse *use_of(int device) {
  ProcessUse *uses = device_state(device)->uses;
  Owner own = this_process();
  for (int i = 0; i < PROCESSES; i++)
    if (uses[i].owner.pid == own.pid && uses[i].owner.began == own.began) return &uses[i];
  return NULL;
}

static ProcessUse *own_use(int device) {
  ProcessUse *uses = device_state(device)->uses, *found = use_of(device);
  Owner own = this_process(), before;
  if (found) return found;
  for (int i = 0; i < PROCESSES; i++) {
    __atomic_load(&uses[i].owner, &before, __ATOMIC_SEQ_CST);
    if (lives(before)) continue;
    if (__atomic_compare_exchange(&uses[i].owner, &before, &own, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
      uses[i].bytes = 0;
      open_file(device);
      return &uses[i];
    }
  }
  abort(); /* more processes at once than a test has */
}

/* As cudaSetDevice() of CUDA 12 and later: the process has a context there, which takes memory. */
void begin_context(int device) { own_use(device); }
bool has_context(int device) { return use_of(device); }

/* Of all processes on this device. */
static uint64_t used(int device) {
  const ProcessUse *uses = device_state(device)->uses;
  uint64_t sum = 0;
  own_use(device);
  for (int i = 0; i < PROCESSES; i++)
    if (lives(uses[i].owner)) sum += uses[i].bytes + CONTEXT;
  return sum;
}

/* Takes `bytes` of the current device, or leaves it as it is. */
static int take(size_t bytes) {
  int device = physical_device();
  if (used(device) + bytes > total_bytes()) return OUT_OF_MEMORY;
  return __atomic_add_fetch(&own_use(device)->bytes, bytes, __ATOMIC_SEQ_CST), SUCCESS;
}
static void give(int device, size_t bytes) { __atomic_sub_fetch(&own_use(device)->bytes, bytes, __ATOMIC_SEQ_CST); }

static void add(void *start, size_t bytes, int kind) {
  int at = 0;
  pthread_mutex_lock(&lock);
  while (at < block_count && blocks[at].start) at++;
  if (at == block_count && ++block_count > (int)(sizeof blocks / sizeof *blocks)) abort();
  blocks[at] = (Block){start, bytes, kind, physical_device()};
  pthread_mutex_unlock(&lock);
}

static Block drop(void *start) {
  Block found = {0};
  pthread_mutex_lock(&lock);
  for (int i = 0; i < block_count && !found.start; i++)
    if (start && blocks[i].start == start) found = blocks[i], blocks[i].start = NULL;
  pthread_mutex_unlock(&lock);
  return found;
}

static Block containing(const void *address) {
  Block found = {0};
  const char *at = address;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < block_count && !found.start; i++)
    if (blocks[i].start && at >= blocks[i].start && at < blocks[i].start + blocks[i].bytes) found = blocks[i];
  pthread_mutex_unlock(&lock);
  return found;
}
bool is_pinned(const void *host) { return containing(host).kind == HOST; }

int cudaMalloc(void **out, size_t bytes) {
  COUNT("cudaMalloc");
  int failed = fault();
  if (failed || (failed = take(bytes))) return failed;
  *out = reserve(bytes, PROT_READ | PROT_WRITE);
  if (*out == MAP_FAILED) return give(physical_device(), bytes), OUT_OF_MEMORY;
  return add(*out, bytes, DEVICE), SUCCESS;
}
int cudaDeviceSynchronize(void);
int cudaGetDevice(int *device);
int cudaFree(void *start) {
  COUNT("cudaFree");
  cudaDeviceSynchronize(); /* as CUDA does: something queued may still use it */
  Block block = drop(start);
  if (block.start) give(block.device, block.bytes), munmap(block.start, block.bytes);
  return fault();
}
int cudaMallocAsync(void **out, size_t bytes, void *stream) { return (void)stream, cudaMalloc(out, bytes); }
int cudaFreeAsync(void *start, void *stream) { return (void)stream, cudaFree(start); }
int cuMemAlloc_v2(void **out, size_t bytes) { return cudaMalloc(out, bytes); }
int cuMemFree_v2(void *start) { return cudaFree(start); }

int cudaMemGetInfo(size_t *available, size_t *total) {
  COUNT("cudaMemGetInfo");
  uint64_t taken = used(physical_device());
  *total = total_bytes();
  return *available = taken < *total ? *total - taken : 0, fault();
}

int cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
  COUNT("cudaHostAlloc");
  (void)flags;
  use_device();
  const char *most = getenv("NULL_GPU_PINNED_MIB");
  if (most && bytes > (size_t)atol(most) << 20) return OUT_OF_MEMORY;
  *out = reserve(bytes, PROT_READ | PROT_WRITE);
  return *out == MAP_FAILED ? OUT_OF_MEMORY : (add(*out, bytes, HOST), fault());
}
int cudaFreeHost(void *start) {
  COUNT("cudaFreeHost");
  cudaDeviceSynchronize();
  Block block = drop(start);
  if (block.start) munmap(block.start, block.bytes);
  return SUCCESS;
}
int cudaHostRegister(void *start, size_t bytes, unsigned flags) { return (void)flags, add(start, bytes, HOST), SUCCESS; }
int cudaHostUnregister(void *start) { return drop(start), SUCCESS; }

typedef struct {
  int type, device;
  void *device_pointer, *host_pointer;
} Attributes;
int cudaPointerGetAttributes(Attributes *out, const void *address) {
  Block block = containing(address);
  *out = (Attributes){block.kind, 0, block.kind ? (void *)address : NULL, block.kind == DEVICE ? NULL : (void *)address};
  return cudaGetDevice(&out->device), SUCCESS;
}
int cuPointerGetAttribute(void *out, int attribute, unsigned long long address) {
  if (attribute == 2) *(int *)out = containing((void *)address).kind == HOST ? 1 : 2; /* memory type */
  else *(unsigned long long *)out = address;                                         /* context, device pointer */
  return SUCCESS;
}

/* Virtual memory, which torch uses with expandable segments: address ranges and pieces of device memory apart. */
int cuMemGetAllocationGranularity(size_t *out, void *properties, int option) { return (void)properties, (void)option, *out = 2 << 20, SUCCESS; }
int cuMemAddressReserve(unsigned long long *out, size_t bytes, size_t alignment, unsigned long long hint, unsigned long long flags) {
  (void)alignment, (void)hint, (void)flags;
  void *range = reserve(bytes, PROT_NONE);
  if (range == MAP_FAILED) return OUT_OF_MEMORY;
  add(range, bytes, DEVICE);
  return *out = (unsigned long long)range, SUCCESS;
}
int cuMemAddressFree(unsigned long long start, size_t bytes) { return drop((void *)start), munmap((void *)start, bytes), SUCCESS; }
int cuMemCreate(unsigned long long *handle, size_t bytes, void *properties, unsigned long long flags) {
  COUNT("cuMemCreate");
  (void)properties, (void)flags;
  int failed = fault();
  if (failed || (failed = take(bytes))) return failed;
  return *handle = (unsigned long long)bytes << 4 | (unsigned)physical_device(), SUCCESS;
}
int cuMemRelease(unsigned long long handle) { return give((int)(handle & 15), handle >> 4), SUCCESS; }
int cuMemMap(unsigned long long start, size_t bytes, size_t offset, unsigned long long handle, unsigned long long flags) {
  (void)offset, (void)handle, (void)flags;
  return mprotect((void *)start, bytes, PROT_READ | PROT_WRITE), SUCCESS;
}
int cuMemUnmap(unsigned long long start, size_t bytes) {
  cudaDeviceSynchronize();
  madvise((void *)start, bytes, MADV_DONTNEED);
  return mprotect((void *)start, bytes, PROT_NONE), SUCCESS;
}
int cuMemSetAccess(unsigned long long start, size_t bytes, void *description, size_t n) {
  return (void)start, (void)bytes, (void)description, (void)n, SUCCESS;
}

/* ---- copies ---- */
enum { TO_DEVICE = 1, TO_HOST = 2, ON_DEVICE = 3 };
static const size_t SMALL = 64 << 10; /* larger contents stay on the "device": touching them would take real memory */

static void do_copy(const Op *op) {
  memcpy(op->to, op->from, op->bytes);
  free(op->owner);
}
static void do_set(const Op *op) { memset(op->to, op->kind, op->bytes); }

int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, Stream *stream) {
  if (kind == TO_DEVICE) COUNT("copy to device");
  else if (kind == TO_HOST) COUNT("copy to host");
  else COUNT("copy on device");
  /* CUDA may copy to and from memory that is not pinned only while the host waits. */
  if ((kind == TO_DEVICE && !is_pinned(from)) || (kind == TO_HOST && !is_pinned(to))) COUNT("SYNC pageable copy");
  bool small = bytes <= SMALL || kind == TO_DEVICE || kind == TO_HOST;
  if (!small || fault()) return fault();
  Op op = {.run = do_copy, .to = to, .from = from, .bytes = bytes};
  if (kind == TO_DEVICE && !is_pinned(from)) { /* the caller may reuse its memory at once */
    op.from = op.owner = malloc(bytes);
    if (!op.owner) return OUT_OF_MEMORY;
    memcpy(op.owner, from, bytes);
  }
  return submit(stream, op, false), SUCCESS;
}
int cudaStreamSynchronize(Stream *stream);
int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
  int failed = cudaMemcpyAsync(to, from, bytes, kind, NULL);
  return failed ? failed : cudaStreamSynchronize(NULL);
}
int cudaMemsetAsync(void *to, int value, size_t bytes, Stream *stream) {
  COUNT("memset");
  if (bytes <= SMALL && !fault()) submit(stream, (Op){.run = do_set, .to = to, .kind = value, .bytes = bytes}, false);
  return fault();
}
int cudaMemset(void *to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, NULL); }
