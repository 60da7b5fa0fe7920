/* What a decoder layer computes between its products, on a CPU: norms, rotary embedding, gates.
 *
 * Compiled twice from this file, for float and for bfloat16 numbers (-DBFLOAT16). All of it is
 * computed in float and rounded where transformers rounds. Each row is computed by itself, in vectors
 * that begin at its start: its bits don't depend on the rows beside it.
 */
#include <math.h>
#include <omp.h>
#include <stdint.h>

#include "vectors.h"

#define FEW (16 << 10) /* numbers; fewer aren't worth waking threads for */

/* What storing and loading leaves of numbers. */
INLINE vec as_stored(vec numbers) {
#ifdef BFLOAT16
    return (vec)(longer(narrow(numbers)) << 16);
#else
    return numbers;
#endif
}

/* 1 / root mean square of a row (Zhang and Sennrich: Root mean square layer normalization). */
INLINE float scale_of(const float *row, int64_t width, float epsilon) {
    vec squares = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        vec here = *(const loose_vec *)(row + i);
        squares += here * here;
    }
    return 1.0f / sqrtf(sum(squares) / width + epsilon);
}

/* `plus_one`: the weight is what is added to one, and nothing is rounded on the way. */
INLINE vec normed(vec row, float scale, const number *weight, int plus_one) {
    if (plus_one) return row * scale * (1.0f + load(weight));
    return load(weight) * as_stored(row * scale);
}

/* norm(rows), rows + added, or rows + norm(added): what there is a weight for is normed.
 *
 * Rows, added (or NULL) and output are [num_rows, width], weight is [width] or NULL, room [width] for
 * each thread. */
void add_and_norm(
    number *output, const number *rows, const number *added, const number *weight, float *room,
    int64_t num_rows, int64_t width, float epsilon, int32_t plus_one, int32_t num_threads
) {
#pragma omp parallel for num_threads(num_threads) schedule(static) \
    if (num_rows > 1 && num_rows * width > FEW)
    for (int64_t r = 0; r < num_rows; r++) {
        float *row = room + omp_get_thread_num() * width;
        const number *from = (added ? added : rows) + r * width;
        for (int64_t i = 0; i < width; i += LANES) *(loose_vec *)(row + i) = load(from + i);
        float scale = weight ? scale_of(row, width, epsilon) : 1.0f;
        for (int64_t i = 0; i < width; i += LANES) {
            vec here = *(loose_vec *)(row + i);
            if (weight) here = normed(here, scale, weight + i, plus_one);
            if (added) here = load(rows + r * width + i) + as_stored(here);
            store(output + r * width + i, here);
        }
    }
}

/* Mirrored by workers/native/decoder.py. Of heads [rows, heads, dim], dense. */
typedef struct {
    number *heads;
    const number *weight; /* [dim] of the norm of each head, or NULL */
    int64_t num_heads;
} head_group;

typedef struct {
    head_group groups[2]; /* queries and keys */
    const number *cosine, *sine; /* [rows, rotary], rotary at most dim */
    float *room;                 /* dim for each thread */
    int64_t num_rows, dim, rotary;
    float epsilon;
    int32_t plus_one, num_threads;
} rotary_arguments;

/* Norms each head, then turns its first `rotary` numbers (Su et al.: RoFormer); in place. */
void norm_and_rotate(const rotary_arguments *a) {
    int64_t dim = a->dim, half = a->rotary / 2;
    int64_t all = a->groups[0].num_heads + a->groups[1].num_heads;
#pragma omp parallel for num_threads(a->num_threads) schedule(static) \
    if (a->num_rows > 1 && a->num_rows * all * dim > FEW)
    for (int64_t r = 0; r < a->num_rows; r++) {
        float *row = a->room + omp_get_thread_num() * dim;
        const number *cosine = a->cosine + r * a->rotary, *sine = a->sine + r * a->rotary;
        for (int64_t h = 0; h < all; h++) {
            const head_group *group = a->groups + (h >= a->groups[0].num_heads);
            int64_t own = h >= a->groups[0].num_heads ? h - a->groups[0].num_heads : h;
            number *head = group->heads + (r * group->num_heads + own) * dim;
            for (int64_t i = 0; i < dim; i += LANES) *(loose_vec *)(row + i) = load(head + i);
            if (group->weight) {
                float scale = scale_of(row, dim, a->epsilon);
                for (int64_t i = 0; i < dim; i += LANES) {
                    vec here = *(loose_vec *)(row + i);
                    here = as_stored(normed(here, scale, group->weight + i, a->plus_one));
                    *(loose_vec *)(row + i) = here;
                    store(head + i, here);
                }
            }
            for (int64_t i = 0; i < half; i += LANES) {
                vec first = *(loose_vec *)(row + i), second = *(loose_vec *)(row + half + i);
                vec one = as_stored(first * load(cosine + i)) - as_stored(second * load(sine + i));
                vec other =
                    as_stored(second * load(cosine + half + i)) + as_stored(first * load(sine + half + i));
                store(head + i, one);
                store(head + half + i, other);
            }
        }
    }
}

INLINE vec silu(vec x) {
    int_vec is_negative = x < 0.0f;
    vec power = exponential(choose(is_negative, x, -x)); /* e^-|x| */
    return x * choose(is_negative, power, splat(1.0f)) / (1.0f + power);
}

/* With tanh (Hendrycks and Gimpel: Gaussian error linear units). */
INLINE vec gelu(vec x) {
    vec inner = 0.7978845608f * (x + 0.044715f * x * x * x);
    int_vec is_negative = inner < 0.0f;
    vec power = exponential(choose(is_negative, inner, -inner) * 2.0f);
    vec tanh = (1.0f - power) / (1.0f + power);
    return 0.5f * x * (1.0f + choose(is_negative, -tanh, tanh));
}

/* output = function(gate) * up, each [size], a multiple of what vectors hold. */
void silu_gate(
    number *output, const number *gate, const number *up, int64_t size, int32_t num_threads
) {
#pragma omp parallel for num_threads(num_threads) schedule(static) if (size > FEW)
    for (int64_t i = 0; i < size; i += LANES)
        store(output + i, as_stored(silu(load(gate + i))) * load(up + i));
}

void gelu_gate(
    number *output, const number *gate, const number *up, int64_t size, int32_t num_threads
) {
#pragma omp parallel for num_threads(num_threads) schedule(static) if (size > FEW)
    for (int64_t i = 0; i < size; i += LANES)
        store(output + i, as_stored(gelu(load(gate + i))) * load(up + i));
}

/* What the caller must know. */
int64_t rotary_bytes(void) { return sizeof(rotary_arguments); }
