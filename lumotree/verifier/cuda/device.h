// What gdn.cu needs of a GPU. emulation.h is its counterpart for a CPU.
#define KERNEL(threads, resident) extern "C" __global__ void __launch_bounds__(threads, resident)
#define PARAMETER __grid_constant__
#define SHARED_MEMORY(name) extern __shared__ __align__(16) char name[]

// Programmatic dependent launch: the next kernel of the stream may take its place on the card early, and waits there.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline unsigned short to_bf16(float x) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// Sixteen bytes from global to shared memory behind the thread's back; zeros unless `live`.
__device__ inline void copy_ahead(float4 *to, const float *from, bool live) {
    const unsigned target = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(from), "r"(live ? 16 : 0) : "memory");
}

__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ inline void store_streaming(float4 *at, float4 y) { __stcs(at, y); }
