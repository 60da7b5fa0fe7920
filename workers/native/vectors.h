/* What the kernels share: numbers as they are stored, and vectors of them as they are computed with.
 *
 * A source is compiled for float numbers, or with -DBFLOAT16 for those. Each names its own work; what
 * of this file it has no use for is no waste, as everything is inlined.
 */
#ifndef VECTORS_H
#define VECTORS_H

#include <stdint.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline, unused))

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t int_vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits_vec __attribute__((vector_size(4 * LANES)));

#ifdef BFLOAT16
typedef uint16_t number;
typedef uint16_t half_vec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

/* GCC 12 takes the conversions of 8 lanes apart, so they are asked for by name. */
INLINE bits_vec longer(half_vec halves) {
#if LANES == 8 && defined(__AVX2__)
    return (bits_vec)_mm256_cvtepu16_epi32((__m128i)halves);
#else
    return __builtin_convertvector(halves, bits_vec);
#endif
}

INLINE half_vec shorter(bits_vec words) {
#if LANES == 8 && defined(__AVX2__)
    __m256i both = _mm256_packus_epi32((__m256i)words, (__m256i)words);
    return (half_vec)_mm256_castsi256_si128(_mm256_permute4x64_epi64(both, 0x8));
#else
    return __builtin_convertvector(words, half_vec);
#endif
}

INLINE vec load(const number *from) { return (vec)(longer(*(const half_vec *)from) << 16); }

INLINE float widen(number from) {
    return ((union { uint32_t bits; float number; }){(uint32_t)from << 16}).number;
}

INLINE half_vec narrow(vec numbers) {
    bits_vec bits = (bits_vec)numbers;
    /* To the nearest, of two the even one; what is no number stays none. */
    bits_vec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    bits_vec is_nan = (bits_vec)(numbers != numbers);
    rounded = (rounded & ~is_nan) | (is_nan & 0x7fc0);
    return shorter(rounded);
}

INLINE void store(number *to, vec numbers) { *(half_vec *)to = narrow(numbers); }
#else
typedef float number;

INLINE vec load(const number *from) { return *(const loose_vec *)from; }

INLINE float widen(number from) { return from; }

INLINE vec narrow(vec numbers) { return numbers; }

INLINE void store(number *to, vec numbers) { *(loose_vec *)to = numbers; }
#endif

INLINE vec splat(float number) { return (vec){0} + number; }

INLINE vec choose(int_vec mask, vec yes, vec no) {
    return (vec)((mask & (int_vec)yes) | (~mask & (int_vec)no));
}

INLINE vec larger(vec one, vec other) { return choose(one > other, one, other); }

/* e^x for x <= 0: 2^n times a polynomial of the rest, within 2 units in the last place. */
INLINE vec exponential(vec x) {
    int_vec is_zero = x < -87.0f;
    x = choose(is_zero, splat(-87.0f), x);
    vec scaled = x * 1.44269504f;
    int_vec whole = __builtin_convertvector(scaled - 0.5f, int_vec); /* towards 0, x <= 0 */
    vec n = __builtin_convertvector(whole, vec);
    vec rest = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    vec power = (vec)((whole + 127) << 23);
    return choose(is_zero, splat(0.0f), p * power);
}

/* Lanes in another order. */
#if LANES == 16
#define SWAP_8 (int_vec){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}
#define SWAP_4 (int_vec){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}
#define SWAP_2 (int_vec){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}
#define SWAP_1 (int_vec){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}
#define PLACES {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#else
#define SWAP_4 (int_vec){4, 5, 6, 7, 0, 1, 2, 3}
#define SWAP_2 (int_vec){2, 3, 0, 1, 6, 7, 4, 5}
#define SWAP_1 (int_vec){1, 0, 3, 2, 5, 4, 7, 6}
#define PLACES {0, 1, 2, 3, 4, 5, 6, 7}
#endif

INLINE float largest(vec numbers) {
#if LANES == 16
    numbers = larger(numbers, __builtin_shuffle(numbers, SWAP_8));
#endif
    numbers = larger(numbers, __builtin_shuffle(numbers, SWAP_4));
    numbers = larger(numbers, __builtin_shuffle(numbers, SWAP_2));
    numbers = larger(numbers, __builtin_shuffle(numbers, SWAP_1));
    return numbers[0];
}

/* Of the lanes of four vectors. */
typedef float quad __attribute__((vector_size(16)));

#if LANES == 16
#define JOIN(one, other)                                                                           \
    (__builtin_shuffle(                                                                            \
         one, other, (int_vec){0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29}           \
     ) +                                                                                           \
     __builtin_shuffle(                                                                            \
         one, other, (int_vec){2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31}         \
     ))
#else
#define JOIN(one, other)                                                                           \
    (__builtin_shuffle(one, other, (int_vec){0, 8, 1, 9, 4, 12, 5, 13}) +                          \
     __builtin_shuffle(one, other, (int_vec){2, 10, 3, 11, 6, 14, 7, 15}))
#endif

INLINE quad sums_of_four(vec a, vec b, vec c, vec d) {
    union {
        vec all;
        quad part[LANES / 4];
    } joined = {JOIN(JOIN(a, c), JOIN(b, d))}; /* of each four lanes: a, b, c, d */
    quad total = joined.part[0];
    for (int i = 1; i < LANES / 4; i++) total += joined.part[i];
    return total;
}

/* Of all lanes. */
INLINE float sum(vec numbers) {
#if LANES == 16
    numbers += __builtin_shuffle(numbers, SWAP_8);
#endif
    numbers += __builtin_shuffle(numbers, SWAP_4);
    numbers += __builtin_shuffle(numbers, SWAP_2);
    numbers += __builtin_shuffle(numbers, SWAP_1);
    return numbers[0];
}

/* Where the compiler must take vectors apart, products by torch are faster. */
int has_vectors(void) {
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
    return 1;
#else
    return 0;
#endif
}

#endif
