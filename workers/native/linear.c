/* Products of the same rows with the weights of one or several linear layers, on a CPU.
 *
 * Compiled twice from this file, for float and for bfloat16 numbers (-DBFLOAT16). Weights are packed
 * once: panels of 16 outputs, in which the weights of one input, or of a pair of them, lie side by
 * side. A tile of rows and panels keeps its sums in registers over all inputs (Goto and van de Geijn:
 * Anatomy of high-performance matrix multiplication), in an order that depends on the number of
 * inputs alone: a row has the same bits in any batch.
 *
 * A work item is as many panels as stay in the second-level cache while all rows pass: at one row it
 * is bandwidth that counts, at many the multiplications.
 */
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "threads.h"
#include "vectors.h"

#define PANEL 16
#define MAX_PARTS 4
#define CHUNK_BYTES (192 << 10)
#define PAGE 4096
#define AHEAD 16 /* groups of inputs */
#define ITEMS 4 /* of a thread, at least, where there are panels enough */
#define FEW (16 << 10) /* numbers; to stage fewer isn't worth sharing */

/* Sums of a tile, with two vectors of weights and one of a row, fill the registers. */
#ifdef __AVX512F__
#define ROWS 12
#else
#define ROWS 5
#endif
#define PARTS_OF_PANEL (PANEL / LANES)
#define MAX_VECTORS 8 /* of weights in a tile of few rows */

#ifdef BFLOAT16
typedef uint32_t group; /* two inputs */
#define GROUP 2
#else
typedef float group;
#define GROUP 1
#endif

#if defined(BFLOAT16) && !defined(__AVX512BF16__)
typedef struct {
    float even, odd;
} staged; /* of a row: what is multiplied with a group of weights */
#else
typedef group staged;
#endif

/* Mirrored by workers/native/linear.py. */
typedef struct {
    const group *weight; /* packed: [panels, inputs / GROUP, PANEL] */
    const number *bias;  /* [outputs], or NULL */
    number *output;      /* [rows, outputs] dense */
    int64_t outputs;
} part;

typedef struct {
    const number *rows; /* [num_rows, inputs] dense */
    void *stage;        /* room for stage_bytes(num_rows, inputs) */
    int64_t inputs;
    int32_t num_parts, num_threads;
    part parts[MAX_PARTS];
} arguments;

/* The rows of one tile, group by group of inputs: [inputs / GROUP, count]. */
static void stage(staged *to, const number *from, int64_t inputs, int count) {
    for (int r = 0; r < count; r++) {
        const number *row = from + r * inputs;
        for (int64_t g = 0; g < inputs / GROUP; g++) {
            staged *place = to + g * count + r;
#if defined(BFLOAT16) && !defined(__AVX512BF16__)
            *place = (staged){widen(row[2 * g]), widen(row[2 * g + 1])};
#else
            memcpy(place, row + GROUP * g, sizeof *place);
#endif
        }
    }
}

/* Loads by way of the pointer stay behind: the compiler would begin so many of them at once that
 * sums must leave the registers. */
#define NOT_BEFORE(pointer) __asm__ volatile("" : "+r"(pointer))

/* Adds the products of a group of inputs. */
INLINE void multiply(
    vec (*sum)[MAX_VECTORS], const staged *row, const group *weight, int64_t panel_groups,
    int num_rows, int num_panels
) {
    int num_vectors = num_panels * PARTS_OF_PANEL;
    /* With few rows it is waiting that counts, and hardware looks no farther than a page. */
    for (int p = 0; num_rows < 3 && p < num_panels; p++)
        __builtin_prefetch(weight + p * panel_groups + AHEAD * PANEL);
#define WEIGHTS(v) \
    (weight + (v) / PARTS_OF_PANEL * panel_groups + (v) % PARTS_OF_PANEL * LANES)
#if defined(BFLOAT16) && defined(__AVX512BF16__)
    __m512bh column[MAX_VECTORS];
    for (int v = 0; v < num_vectors; v++) column[v] = (__m512bh)_mm512_load_si512(WEIGHTS(v));
    for (int r = 0; r < num_rows; r++) {
        __m512bh pair = (__m512bh)_mm512_set1_epi32(row[r]);
        for (int v = 0; v < num_vectors; v++)
            sum[r][v] = (vec)_mm512_dpbf16_ps((__m512)sum[r][v], pair, column[v]);
    }
#elif defined(BFLOAT16)
    vec column[MAX_VECTORS];
    for (int v = 0; v < num_vectors; v++) column[v] = (vec)(*(const bits_vec *)WEIGHTS(v) << 16);
    for (int r = 0; r < num_rows; r++) {
        NOT_BEFORE(row);
        for (int v = 0; v < num_vectors; v++) sum[r][v] += row[r].even * column[v];
    }
    NOT_BEFORE(weight);
    for (int v = 0; v < num_vectors; v++)
        column[v] = (vec)(*(const bits_vec *)WEIGHTS(v) & 0xffff0000u);
    for (int r = 0; r < num_rows; r++) {
        NOT_BEFORE(row);
        for (int v = 0; v < num_vectors; v++) sum[r][v] += row[r].odd * column[v];
    }
#else
    vec column[MAX_VECTORS];
    for (int v = 0; v < num_vectors; v++) column[v] = *(const vec *)WEIGHTS(v);
    for (int r = 0; r < num_rows; r++)
        for (int v = 0; v < num_vectors; v++) sum[r][v] += row[r] * column[v];
#endif
}

/* Some rows and panels; `row` is the place of the first in the output. */
INLINE void tile(
    const part *p, const staged *rows, int64_t inputs, int64_t row, int64_t panel, int num_rows,
    int num_panels
) {
    vec sum[ROWS][MAX_VECTORS];
    int num_vectors = num_panels * PARTS_OF_PANEL;
    for (int r = 0; r < num_rows; r++)
        for (int v = 0; v < num_vectors; v++) sum[r][v] = (vec){0};
    int64_t panel_groups = inputs / GROUP * PANEL;
    const group *weight = p->weight + panel * panel_groups;
    for (int64_t g = 0; g < inputs / GROUP; g++)
        multiply(sum, rows + g * num_rows, weight + g * PANEL, panel_groups, num_rows, num_panels);
    for (int v = 0; v < num_vectors; v++) {
        int64_t column = panel * PANEL + v * LANES;
        int64_t count = p->outputs - column < LANES ? p->outputs - column : LANES;
        if (count <= 0) break;
        float bias[LANES] = {0};
        if (p->bias)
            for (int c = 0; c < count; c++) bias[c] = widen(p->bias[column + c]);
        vec wide;
        memcpy(&wide, bias, sizeof wide);
        for (int r = 0; r < num_rows; r++) {
            number *to = p->output + (row + r) * p->outputs + column;
            __typeof__(narrow(wide)) made = narrow(sum[r][v] + wide);
            if (count == LANES)
                memcpy(to, &made, sizeof made);
            else
                memcpy(to, &made, count * sizeof(number));
        }
    }
}

/* The rows of one tile and the panels [begin, end). */
#define CASE(n, at_once)                                                                          \
    case n:                                                                                       \
        for (; panel + at_once <= end; panel += at_once)                                          \
            tile(p, rows, inputs, row, panel, n, at_once);                                        \
        for (; panel < end; panel++) tile(p, rows, inputs, row, panel, n, 1);                     \
        break;

static void strip(
    const part *p, const staged *rows, int64_t inputs, int64_t row, int count, int64_t panel,
    int64_t end
) {
    switch (count) {
#if ROWS == 12
        CASE(1, 8) CASE(2, 8) CASE(3, 8) CASE(4, 6) CASE(5, 4) CASE(6, 4) CASE(7, 3) CASE(8, 3)
        CASE(9, 2) CASE(10, 2) CASE(11, 2) CASE(12, 2)
#else
        CASE(1, 4) CASE(2, 2) CASE(3, 1) CASE(4, 1) CASE(5, 1)
#endif
    }
}

/* What the threads share: strips of rows, and as items some panels of one part each. */
typedef struct {
    const arguments *a;
    int64_t num_rows, num_strips, chunk;
    int64_t firsts[MAX_PARTS + 1]; /* item of each part */
} job;

static int64_t count_panels(const part *p) { return (p->outputs + PANEL - 1) / PANEL; }

/* As even as can be. */
static int64_t first_row(const job *j, int64_t s) { return s * j->num_rows / j->num_strips; }

static void stage_strip(const void *given, int64_t s, int thread) {
    const job *j = given;
    const arguments *a = j->a;
    int64_t row = first_row(j, s);
    stage(
        (staged *)a->stage + row * (a->inputs / GROUP), a->rows + row * a->inputs, a->inputs,
        first_row(j, s + 1) - row
    );
    (void)thread;
}

static void multiply_panels(const void *given, int64_t item, int thread) {
    const job *j = given;
    const arguments *a = j->a;
    int p = 0;
    while (item >= j->firsts[p + 1]) p++;
    int64_t begin = (item - j->firsts[p]) * j->chunk, end = begin + j->chunk;
    int64_t panels = count_panels(a->parts + p);
    for (int64_t s = 0; s < j->num_strips; s++) {
        int64_t row = first_row(j, s);
        strip(
            a->parts + p, (const staged *)a->stage + row * (a->inputs / GROUP), a->inputs, row,
            first_row(j, s + 1) - row, begin, end < panels ? end : panels
        );
    }
    (void)thread;
}

void linear(const void *given, int64_t num_rows) {
    const arguments *a = given;
    job j = {.a = a, .num_rows = num_rows, .num_strips = (num_rows + ROWS - 1) / ROWS};
    int64_t panel_bytes = a->inputs * (int64_t)(PANEL * sizeof(number)), total = 0;
    for (int p = 0; p < a->num_parts; p++) total += count_panels(a->parts + p);
    int64_t even = total / (ITEMS * a->num_threads);
    j.chunk = CHUNK_BYTES / panel_bytes;
    if (j.chunk > even) j.chunk = even;
    if (j.chunk > 4) j.chunk -= j.chunk % 4;
    if (j.chunk < 1) j.chunk = 1;
    for (int p = 0; p < a->num_parts; p++)
        j.firsts[p + 1] = j.firsts[p] + (count_panels(a->parts + p) + j.chunk - 1) / j.chunk;
    int32_t stagers = num_rows * a->inputs > FEW ? a->num_threads : 1;
    lockstep_run_items(stage_strip, &j, j.num_strips, stagers);
    lockstep_run_items(multiply_panels, &j, j.firsts[a->num_parts], a->num_threads);
}

typedef struct {
    group *to;
    const number *from;
    int64_t outputs, inputs, row_stride, stride;
} packing;

static void pack_panel(const void *given, int64_t p, int thread) {
    const packing *how = given;
    int64_t groups = how->inputs / GROUP;
    for (int64_t g = 0; g < groups; g++) {
        number *place = (number *)(how->to + (p * groups + g) * PANEL);
        for (int64_t c = 0; c < PANEL; c++)
            for (int i = 0; i < GROUP; i++) {
                int64_t output = p * PANEL + c, input = g * GROUP + i;
                const number *from = how->from + output * how->row_stride + input * how->stride;
                *place++ = output < how->outputs ? *from : (number)0;
            }
    }
    (void)thread;
}

/* Weights [outputs, inputs], `row_stride` and `stride` numbers apart, into panels; outputs that a
 * panel lacks are zeros. */
void pack(
    group *to, const number *from, int64_t outputs, int64_t inputs, int64_t row_stride,
    int64_t stride, int32_t num_threads
) {
    int64_t groups = inputs / GROUP, panels = (outputs + PANEL - 1) / PANEL;
    /* Large pages, where the system gives them to who asks: a product walks through all of it. */
    uintptr_t begin = ((uintptr_t)to + PAGE - 1) / PAGE * PAGE;
    uintptr_t end = (uintptr_t)(to + panels * groups * PANEL) / PAGE * PAGE;
    if (end > begin) madvise((void *)begin, end - begin, MADV_HUGEPAGE);
    packing how = {to, from, outputs, inputs, row_stride, stride};
    lockstep_run_items(pack_panel, &how, panels, num_threads);
}

/* What the caller must know. */
int64_t arguments_bytes(void) { return sizeof(arguments); }

int64_t stage_bytes(int64_t num_rows, int64_t inputs) {
    return num_rows * (inputs / GROUP) * (int64_t)sizeof(staged);
}

int64_t inputs_multiple(void) { return GROUP; }
