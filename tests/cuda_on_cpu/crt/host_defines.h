// Stands in for the header of this name, which NVIDIA ships with nvcc alone and vector_types.h includes.
#pragma once

#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __device_builtin__
#define __cudart_builtin__
#define __forceinline__ inline
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __align__(bytes)
#define CUDARTAPI
#define CUDART_CB
#define __annotate__(what)
#define __location__(what)
#define __specialization_static
