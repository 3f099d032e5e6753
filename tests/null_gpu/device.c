/* Devices, their state, counters, and the driver's entry points that torch and Triton call. */
#include "null_gpu.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- counters ---- */
enum { COUNTERS = 1024 };
static struct {
  const char *name;
  long calls;
} counters[COUNTERS];
static pthread_mutex_t counters_lock = PTHREAD_MUTEX_INITIALIZER;

long *counter(const char *name) {
  int i = 0;
  pthread_mutex_lock(&counters_lock);
  while (i < COUNTERS - 1 && counters[i].name && strcmp(counters[i].name, name)) i++;
  counters[i].name = name;
  pthread_mutex_unlock(&counters_lock);
  return &counters[i].calls;
}

/* The i-th counter; 0 after the last. */
int null_gpu_count(int i, const char **name, long *calls) {
  if (i < 0 || i >= COUNTERS || !counters[i].name) return 0;
  *name = counters[i].name;
  *calls = __atomic_load_n(&counters[i].calls, __ATOMIC_RELAXED);
  return 1;
}

void null_gpu_reset(void) {
  for (int i = 0; i < COUNTERS; i++) __atomic_store_n(&counters[i].calls, 0, __ATOMIC_RELAXED);
}

/* ---- devices ---- */
double setting(const char *name, double otherwise) {
  const char *value = getenv(name);
  return value && *value ? atof(value) : otherwise;
}

uint64_t total_bytes(void) { return (uint64_t)(setting("NULL_GPU_GIB", 80) * (1ull << 30)); }

static DeviceState *states;
static int visible[DEVICES], visible_count;
static __thread int current;

/* CUDA_VISIBLE_DEVICES has numbers or the UUIDs that NVML shows. The first unknown entry ends the list, as in CUDA. */
static void read_visible(void) {
  int count = (int)setting("NULL_GPU_COUNT", 2);
  if (count > DEVICES) count = DEVICES;
  const char *list = getenv("CUDA_VISIBLE_DEVICES");
  if (!list) {
    for (visible_count = 0; visible_count < count; visible_count++) visible[visible_count] = visible_count;
    return;
  }
  for (const char *at = list; *at && visible_count < DEVICES;) {
    unsigned number;
    if (sscanf(at, "GPU-%8x", &number) == 1) number -= 0xa0;
    else if (sscanf(at, "%u", &number) != 1) break;
    if (number >= (unsigned)count) break;
    visible[visible_count++] = (int)number;
    at += strcspn(at, ",");
    if (*at) at++;
  }
}

__attribute__((constructor)) static void start(void) {
  const char *path = getenv("NULL_GPU_STATE");
  int file = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
  size_t size = sizeof(DeviceState[DEVICES]);
  if (file >= 0 && ftruncate(file, (off_t)size)) abort();
  states = mmap(0, size, PROT_READ | PROT_WRITE, file >= 0 ? MAP_SHARED : MAP_SHARED | MAP_ANONYMOUS, file, 0);
  if (states == MAP_FAILED) abort();
  if (file >= 0) close(file);
}
/* Read at the first call, as in CUDA: a program may have set the variable itself. */
static int devices(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, read_visible);
  return visible_count;
}
int physical(int device) { return devices(), visible[device]; }

/* 16 bytes, of which NVML shows the text. */
void null_gpu_uuid(char *out, int device) {
  memset(out, 0, 16);
  out[3] = (char)(0xa0 + physical(device));
  out[6] = 0x40, out[8] = (char)0x80;
}

DeviceState *device_state(int physical) { return &states[physical]; }
int physical_device(void) { return physical(current); }
int fault(void) { return devices() ? states[visible[current]].fault : NO_DEVICE; }

void use_device(void) {
  if (devices()) begin_context(visible[current]);
}

int cudaGetDeviceCount(int *count) {
  COUNT("cudaGetDeviceCount");
  return *count = devices(), *count ? SUCCESS : NO_DEVICE;
}
int cudaGetDevice(int *device) { return *device = current, SUCCESS; }
int cudaSetDevice(int device) {
  COUNT("cudaSetDevice");
  if (device < 0 || device >= devices()) return INVALID_DEVICE;
  begin_context(visible[device]);
  return current = device, fault();
}
int cudaDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
int cudaRuntimeGetVersion(int *version) { return *version = 13000, SUCCESS; }
int cudaGetLastError(void) { return SUCCESS; }
int cudaPeekAtLastError(void) { return SUCCESS; }
int cudaDeviceCanAccessPeer(int *can, int a, int b) { return *can = a != b, SUCCESS; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, SUCCESS; }
int cudaDeviceGetPCIBusId(char *out, int length, int device) {
  return snprintf(out, (size_t)length, "0000:%02x:00.0", physical(device) + 1), SUCCESS;
}

const char *cudaGetErrorString(int code) {
  static __thread char text[64];
  switch (code) { /* as the CUDA runtime writes them: programs read these texts */
    case SUCCESS: return "no error";
    case OUT_OF_MEMORY: return "out of memory";
    case NO_DEVICE: return "no CUDA-capable device is detected";
    case INVALID_DEVICE: return "invalid device ordinal";
    case 46: return "CUDA-capable device(s) is/are busy or unavailable";
    case 214: return "uncorrectable ECC error encountered";
    case 700: return "an illegal memory access was encountered";
    case 719: return "unspecified launch failure";
    case 999: return "unknown error";
    default: return snprintf(text, sizeof text, "error %d of the null GPU", code), text;
  }
}
const char *cudaGetErrorName(int code) { return cudaGetErrorString(code); }

static int major(void) { return (int)setting("NULL_GPU_CAPABILITY", 9.0); }
static int minor(void) { return (int)lround(setting("NULL_GPU_CAPABILITY", 9.0) * 10) - 10 * major(); }

int null_gpu_shared_memory(int major_, int minor_) {
  switch (major_) { /* bytes a block may opt into: CUDA C++ Programming Guide, technical specifications */
    case 7: return minor_ == 5 ? 65536 : 98304;
    case 8: return minor_ == 6 || minor_ == 9 ? 101376 : 166912;
    case 12: return 101376;
    default: return 232448;
  }
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  switch (attribute) { /* cudaDeviceAttr */
    case 1: *value = 1024; break;                                  /* threads of a block */
    case 2: case 3: *value = 1024; break;                          /* block, x and y */
    case 4: *value = 64; break;                                    /* block, z */
    case 5: *value = 2147483647; break;                            /* grid, x */
    case 6: case 7: *value = 65535; break;                         /* grid, y and z */
    case 8: *value = 49152; break;                                 /* shared memory of a block */
    case 10: *value = 32; break;                                   /* warp */
    case 12: case 82: *value = 65536; break;                       /* registers of a block, of a processor */
    case 16: *value = (int)setting("NULL_GPU_PROCESSORS", 132); break;
    case 31: case 41: case 78: *value = 1; break;                  /* concurrent kernels, one address space, priorities */
    case 38: *value = 50 << 20; break;                             /* level-2 cache */
    case 39: *value = 2048; break;                                 /* threads of a processor */
    case 75: *value = major(); break;
    case 76: *value = minor(); break;
    case 81: *value = major() == 9 ? 233472 : 102400; break;       /* shared memory of a processor */
    case 97: *value = null_gpu_shared_memory(major(), minor()); break;
    case 102: case 103: case 115: *value = 1; break;               /* virtual memory, handles, memory pools */
    default: *value = 0;
  }
  return SUCCESS;
}

/* ---- the driver ---- */
static char context[64];
static int nothing(void) { return SUCCESS; }

static void *entry(const char *name) {
  void *function = dlsym(RTLD_DEFAULT, name);
  if (!function && getenv("NULL_GPU_VERBOSE")) fprintf(stderr, "null GPU: %s does nothing\n", name);
  return function ? function : (void *)nothing;
}

int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *found) {
  (void)version, (void)flags;
  if (found) *found = 0;
  return *function = entry(name), SUCCESS;
}
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *found) {
  return cudaGetDriverEntryPointByVersion(name, function, (unsigned)version, flags, found);
}
int cuInit(unsigned flags) { return (void)flags, devices() ? SUCCESS : NO_DEVICE; }
int cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
int cuDeviceGetCount(int *count) { return *count = devices(), SUCCESS; }
int cuDeviceGet(int *device, int index) { return *device = index, SUCCESS; }
int cuDeviceGetName(char *out, int length, int device) { return (void)device, snprintf(out, (size_t)length, "null GPU"), SUCCESS; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return cudaDeviceGetAttribute(value, attribute, device); }
int cuDeviceGetUuid(char *out, int device) { return null_gpu_uuid(out, device), SUCCESS; }
int cuDeviceGetPCIBusId(char *out, int length, int device) { return cudaDeviceGetPCIBusId(out, length, device); }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return (void)device, *bytes = total_bytes(), SUCCESS; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = has_context(physical(device)), SUCCESS; }
int cuDevicePrimaryCtxRetain(void **out, int device) { return (void)device, *out = context, SUCCESS; }
int cuCtxGetCurrent(void **out) { return *out = context, SUCCESS; }
int cuCtxSetCurrent(void *in) { return (void)in, SUCCESS; }
int cuCtxGetDevice(int *device) { return *device = current, SUCCESS; }
int cuCtxPushCurrent_v2(void *in) { return (void)in, SUCCESS; }
int cuCtxPopCurrent_v2(void **out) { return *out = context, SUCCESS; }
int cuCtxGetLimit(size_t *value, int limit) { return (void)limit, *value = 1024, SUCCESS; }
int cuCtxSetLimit(int limit, size_t value) { return (void)limit, (void)value, SUCCESS; }
int cuGetErrorString(int code, const char **text) { return *text = cudaGetErrorString(code), SUCCESS; }
int cuGetErrorName(int code, const char **text) { return *text = cudaGetErrorName(code), SUCCESS; }

/* Triton's modules: nothing is loaded, and a kernel has plausible properties. */
static char module[8];
int cuModuleLoad(void **out, const char *path) { return (void)path, *out = module, SUCCESS; }
int cuModuleLoadData(void **out, const void *image) { return (void)image, *out = module, SUCCESS; }
int cuModuleLoadDataEx(void **out, const void *image, unsigned n, void *o, void *v) { return (void)n, (void)o, (void)v, cuModuleLoadData(out, image); }
int cuModuleGetFunction(void **out, void *in, const char *name) { return (void)in, (void)name, *out = module, SUCCESS; }
int cuModuleGetGlobal_v2(void) { return SUCCESS; }
int cuModuleUnload(void *in) { return (void)in, SUCCESS; }
int cuFuncGetAttribute(int *value, int attribute, void *f) { return (void)f, *value = attribute == 4 ? 64 : attribute == 0 ? 1024 : 0, SUCCESS; }
int cuFuncSetAttribute(void *f, int attribute, int value) { return (void)f, (void)attribute, (void)value, SUCCESS; }
int cuFuncSetCacheConfig(void *f, int config) { return (void)f, (void)config, SUCCESS; }
int cuFuncGetModule(void **out, void *f) { return (void)f, *out = module, SUCCESS; }
int cuOccupancyMaxActiveClusters(int *n, void *f, void *c) { return (void)f, (void)c, *n = 16, SUCCESS; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int b, size_t s) { return (void)f, (void)b, (void)s, *n = 2, SUCCESS; }
int cuTensorMapEncodeTiled(void) { return SUCCESS; }
