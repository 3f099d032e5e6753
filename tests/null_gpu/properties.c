/* cudaGetDeviceProperties needs the exact structure, so this file alone has CUDA's headers. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int physical(int device); /* before CUDA_VISIBLE_DEVICES */
void null_gpu_uuid(char *out, int device);
int null_gpu_shared_memory(int major, int minor);
double setting(const char *name, double otherwise);
unsigned long total_bytes(void);

/* CUDA 12 calls it cudaGetDeviceProperties_v2, by a macro. */
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
  double capability = setting("NULL_GPU_CAPABILITY", 9.0);
  memset(out, 0, sizeof *out);
  snprintf(out->name, sizeof out->name, "%s", getenv("NULL_GPU_NAME") ? getenv("NULL_GPU_NAME") : "NVIDIA H100 80GB HBM3");
  null_gpu_uuid(out->uuid.bytes, device);
  out->totalGlobalMem = total_bytes();
  out->major = (int)capability;
  out->minor = (int)(capability * 10 + 0.5) - 10 * out->major;
  out->multiProcessorCount = (int)setting("NULL_GPU_PROCESSORS", 132);
  out->warpSize = 32;
  out->maxThreadsPerBlock = out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
  out->maxThreadsDim[2] = 64;
  out->maxThreadsPerMultiProcessor = out->major == 12 || (out->major == 8 && out->minor) ? 1536 : out->major == 7 && out->minor ? 1024 : 2048;
  out->maxBlocksPerMultiProcessor = 32;
  out->maxGridSize[0] = 2147483647;
  out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536;
  out->sharedMemPerBlock = 49152;
  out->sharedMemPerMultiprocessor = out->major == 9 ? 233472 : 102400;
  out->sharedMemPerBlockOptin = (size_t)null_gpu_shared_memory(out->major, out->minor);
  out->reservedSharedMemPerBlock = 1024;
  out->memPitch = 2147483647;
  out->totalConstMem = 65536;
  out->textureAlignment = 512;
  out->texturePitchAlignment = 32;
  out->l2CacheSize = 50 << 20;
  out->memoryBusWidth = 5120;
  out->pciBusID = physical(device) + 1;
  out->asyncEngineCount = 3;
  out->canMapHostMemory = out->concurrentKernels = out->unifiedAddressing = out->managedMemory = out->cooperativeLaunch = 1;
  out->streamPrioritiesSupported = out->globalL1CacheSupported = out->localL1CacheSupported = 1;
  out->memoryPoolsSupported = out->unifiedFunctionPointers = 1;
  out->clusterLaunch = out->major >= 9;
#if CUDART_VERSION >= 13000 // whose structure has it
  out->hostNumaId = -1;
#endif
  return cudaSuccess;
}
