/* Macros shared by the C kernels: export and alignment. */

#ifndef FIRSTLOSS_KERNELS_H
#define FIRSTLOSS_KERNELS_H

#include "_arithmetic.h"

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#if defined(__GNUC__)
#define ALIGNED __attribute__((aligned(64)))
#else
#define ALIGNED
#endif

#endif
