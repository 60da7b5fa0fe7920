/* What a decoder layer computes between its products, on a CPU: norms, rotary embedding, gates.
 *
 * Compiled twice from this file, for float and for bfloat16 numbers (-DBFLOAT16). All of it is
 * computed in float and rounded where transformers rounds. Each row is computed by itself, in vectors
 * that begin at its start: its bits don't depend on the rows beside it.
 */
#include <math.h>
#include <stdint.h>

#include "threads.h"
#include "vectors.h"

#define FEW (16 << 10) /* numbers; fewer aren't worth sharing */
#define ITEM (4 << 10) /* numbers of an item, about */

/* What storing and loading leaves of numbers. */
INLINE vec as_stored(vec numbers) {
#ifdef BFLOAT16
    return (vec)(longer(narrow(numbers)) << 16);
#else
    return numbers;
#endif
}

/* 1 / root mean square of a row (Zhang and Sennrich: Root mean square layer normalization). */
INLINE float scale_of(const number *row, int64_t width, float epsilon) {
    vec squares = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        vec here = load(row + i);
        squares += here * here;
    }
    return 1.0f / sqrtf(sum(squares) / width + epsilon);
}

/* `plus_one`: the weight is what is added to one, and nothing is rounded on the way. */
INLINE vec normed(vec row, float scale, const number *weight, int plus_one) {
    if (plus_one) return row * scale * (1.0f + load(weight));
    return load(weight) * as_stored(row * scale);
}

/* A kernel computes runs of rows: an item is one of them. */
typedef struct {
    const void *arguments;
    int64_t num_rows, run;
} job;

static void share_rows(
    item_function *compute, const void *arguments, int64_t num_rows, int64_t width,
    int32_t num_threads
) {
    job j = {arguments, num_rows, ITEM / width + 1};
    if (num_rows * width <= FEW) j.run = num_rows;
    if (num_rows) lockstep_run_items(compute, &j, (num_rows + j.run - 1) / j.run, num_threads);
}

#define FOR_ROWS(j, item)                                                                          \
    for (int64_t r = (item) * (j)->run; r < ((item) + 1) * (j)->run && r < (j)->num_rows; r++)

/* Mirrored by workers/native/decoder.py. */
typedef struct {
    number *output;
    const number *rows, *added; /* [num_rows, width]; added may be NULL */
    const number *weight;       /* [width], or NULL */
    int64_t width;
    float epsilon;
    int32_t plus_one, num_threads;
} norm_arguments;

static void add_and_norm_rows(const void *given, int64_t item, int thread) {
    const job *j = given;
    const norm_arguments *a = j->arguments;
    FOR_ROWS(j, item) {
        const number *rows = a->rows + r * a->width;
        const number *from = a->added ? a->added + r * a->width : rows;
        float scale = a->weight ? scale_of(from, a->width, a->epsilon) : 1.0f;
        for (int64_t i = 0; i < a->width; i += LANES) {
            vec here = load(from + i);
            if (a->weight) here = normed(here, scale, a->weight + i, a->plus_one);
            if (a->added) here = load(rows + i) + as_stored(here);
            store(a->output + r * a->width + i, here);
        }
    }
    (void)thread;
}

/* norm(rows), rows + added, or rows + norm(added): what there is a weight for is normed. */
void add_and_norm(const void *given, int64_t num_rows) {
    const norm_arguments *a = given;
    share_rows(add_and_norm_rows, a, num_rows, a->width, a->num_threads);
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
    int64_t dim, rotary;
    float epsilon;
    int32_t plus_one, num_threads;
} rotary_arguments;

static void turn_head(
    const rotary_arguments *a, number *head, const number *weight, const number *cosine,
    const number *sine
) {
    int64_t half = a->rotary / 2;
    if (weight) {
        float scale = scale_of(head, a->dim, a->epsilon);
        for (int64_t i = 0; i < a->dim; i += LANES)
            store(head + i, normed(load(head + i), scale, weight + i, a->plus_one));
    }
    for (int64_t i = 0; i < half; i += LANES) {
        vec first = load(head + i), second = load(head + half + i);
        vec one = as_stored(first * load(cosine + i)) - as_stored(second * load(sine + i));
        vec other =
            as_stored(second * load(cosine + half + i)) + as_stored(first * load(sine + half + i));
        store(head + i, one);
        store(head + half + i, other);
    }
}

static void norm_and_rotate_rows(const void *given, int64_t item, int thread) {
    const job *j = given;
    const rotary_arguments *a = j->arguments;
    FOR_ROWS(j, item) {
        const number *cosine = a->cosine + r * a->rotary, *sine = a->sine + r * a->rotary;
        for (const head_group *group = a->groups; group < a->groups + 2; group++)
            for (int64_t h = 0; h < group->num_heads; h++)
                turn_head(
                    a, group->heads + (r * group->num_heads + h) * a->dim, group->weight, cosine, sine
                );
    }
    (void)thread;
}

/* Norms each head, then turns its first `rotary` numbers (Su et al.: RoFormer); in place. */
void norm_and_rotate(const void *given, int64_t num_rows) {
    const rotary_arguments *a = given;
    int64_t width = (a->groups[0].num_heads + a->groups[1].num_heads) * a->dim;
    share_rows(norm_and_rotate_rows, a, num_rows, width, a->num_threads);
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

/* Mirrored by workers/native/decoder.py: [num_rows, width] each. */
typedef struct {
    number *output;
    const number *gate, *up;
    int64_t width;
    int32_t num_threads;
} gate_arguments;

/* output = function(gate) * up. */
#define GATE(function)                                                                             \
    static void function##_gate_rows(const void *given, int64_t item, int thread) {                \
        const job *j = given;                                                                      \
        const gate_arguments *a = j->arguments;                                                    \
        FOR_ROWS(j, item)                                                                          \
        for (int64_t i = r * a->width; i < (r + 1) * a->width; i += LANES)                         \
            store(a->output + i, as_stored(function(load(a->gate + i))) * load(a->up + i));        \
        (void)thread;                                                                              \
    }                                                                                              \
                                                                                                   \
    void function##_gate(const void *given, int64_t num_rows) {                                    \
        const gate_arguments *a = given;                                                           \
        share_rows(function##_gate_rows, a, num_rows, a->width, a->num_threads);                   \
    }

GATE(silu)
GATE(gelu)

/* What the caller must know. */
int64_t norm_bytes(void) { return sizeof(norm_arguments); }

int64_t rotary_bytes(void) { return sizeof(rotary_arguments); }

int64_t gate_bytes(void) { return sizeof(gate_arguments); }
