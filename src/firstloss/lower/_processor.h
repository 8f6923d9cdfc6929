/* Functions compiled for several processors, of which the one at hand takes the best. */

#define INLINE inline __attribute__((always_inline))

/* Defines the function `name`, which does what `name`_inline does. Its parameters and arguments are in parentheses. */
#if defined(__x86_64__)
#define BY_PROCESSOR(name, parameters, arguments)                                           \
    __attribute__((target("avx2"))) static void name##_in_8 parameters {                    \
        name##_inline arguments;                                                            \
    }                                                                                       \
    __attribute__((target("avx512f,avx512vl"))) static void name##_in_16 parameters {       \
        name##_inline arguments;                                                            \
    }                                                                                       \
    static void name parameters {                                                           \
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")) {      \
            name##_in_16 arguments;                                                         \
        } else if (__builtin_cpu_supports("avx2")) {                                        \
            name##_in_8 arguments;                                                          \
        } else {                                                                            \
            name##_inline arguments;                                                        \
        }                                                                                   \
    }
#else
#define BY_PROCESSOR(name, parameters, arguments) \
    static void name parameters { name##_inline arguments; }
#endif
