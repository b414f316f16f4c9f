/* Weights of a model file, packed for the step: see `enum llmrt_format` in abi.h.
 *
 * A reader takes one group of 32 weights of one row out of its storage kind: as integers with
 * w = q * d + m, or as values. A writer puts it into its places in the strip. What cannot be
 * represented is said where it happens; no content of a file does more than give wrong weights.
 *
 * Scales are rounded to float16 to the nearest, ties to even. One that is too large becomes the
 * largest float16; infinities and NaNs stay, so that the logits show that the file is damaged.
 */
#include "abi.h"
#include "format.h"

#include <string.h>

enum { GROUP = LLMRT_GROUP, STRIP = LLMRT_STRIP, QUADS = GROUP / 4 };

typedef struct {
    int8_t q[GROUP];
    uint16_t d, m; /* float16 */
} group;

static inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline uint16_t load16(const uint8_t *p) {
    return (uint16_t)(p[0] | p[1] << 8);
}

/* Without a branch, so that loops over weights become vectors. */
static inline uint32_t pick(int condition, uint32_t yes, uint32_t no) {
    uint32_t mask = 0u - (uint32_t)condition;
    return (yes & mask) | (no & ~mask);
}

static inline float float_of_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, size = (uint32_t)(half & 0x7fff) << 13;
    const uint32_t smallest = 113u << 23; /* normal float16, 2^-14 */
    uint32_t subnormal =
        bits_of_float(float_of_bits(size + smallest) - float_of_bits(smallest));
    uint32_t bits = pick(size < 0x0400u << 13, subnormal, size + (112u << 23));
    return float_of_bits(sign | pick(size < 0x7c00u << 13, bits, size | 0x7f800000));
}

static inline uint16_t half_of_float(float value) {
    uint32_t bits = bits_of_float(value), size = bits & 0x7fffffff;
    /* Beside 0.5 a float32 has the resolution of the subnormal ones, 2^-24. */
    uint32_t subnormal = bits_of_float(float_of_bits(size) + 0.5f) - bits_of_float(0.5f);
    uint32_t half = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    half = pick(size < 113u << 23, subnormal, half);
    half = pick(size < 0x477fe000, half, 0x7bff); /* the largest one, 65504 */
    half = pick(size < 0x7f800000, half, 0x7c00 + (size > 0x7f800000 ? 0x200 : 0));
    return (uint16_t)((bits >> 16 & 0x8000) | half);
}

#define EACH_BYTE(value) ((value) * 0x0101010101010101u)

static inline uint64_t load64(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

/* Nibbles of 16 bytes: the low ones first. */
static inline void read_nibbles(const uint8_t *packed, int8_t *q) {
    for (int i = 0; i < 16; i += 8) {
        uint64_t pairs = load64(packed + i);
        uint64_t low = pairs & EACH_BYTE(15), high = pairs >> 4 & EACH_BYTE(15);
        memcpy(q + i, &low, 8);
        memcpy(q + i + 16, &high, 8);
    }
}

/* Bit i of a byte as 16 in byte i. */
static inline uint64_t spread(uint8_t bits) {
    uint64_t kept = EACH_BYTE((uint64_t)bits) & 0x8040201008040201u;
    return (kept + EACH_BYTE(0x7f)) >> 3 & EACH_BYTE(16);
}

/* Nibbles of 16 bytes, bit i of `high` above number i. */
static inline void read_5_bits(const uint8_t *packed, const uint8_t *high, int8_t *q) {
    read_nibbles(packed, q);
    for (int i = 0; i < GROUP / 8; i++) {
        uint64_t both = load64((const uint8_t *)q + 8 * i) | spread(high[i]);
        memcpy(q + 8 * i, &both, 8);
    }
}

/* q from 0 to 15, as the 4-bit formats want it; 8 d that is too large is not exact. */
static void read_q4_0(const uint8_t *row, int64_t g, group *out) {
    const uint8_t *block = row + 18 * g;
    read_nibbles(block + 2, out->q);
    out->d = load16(block);
    out->m = half_of_float(-8.0f * float_of_half(out->d));
}

static void read_q4_0_signed(const uint8_t *row, int64_t g, group *out) {
    read_q4_0(row, g, out);
    for (int i = 0; i < GROUP; i++) out->q[i] -= 8;
    out->m = 0;
}

static void read_q4_1(const uint8_t *row, int64_t g, group *out) {
    const uint8_t *block = row + 20 * g;
    read_nibbles(block + 4, out->q);
    out->d = load16(block);
    out->m = load16(block + 2);
}

static void read_q5_0(const uint8_t *row, int64_t g, group *out) {
    const uint8_t *block = row + 22 * g;
    read_5_bits(block + 6, block + 2, out->q);
    for (int i = 0; i < GROUP; i++) out->q[i] -= 16;
    out->d = load16(block);
    out->m = 0;
}

static void read_q5_1(const uint8_t *row, int64_t g, group *out) {
    const uint8_t *block = row + 24 * g;
    read_5_bits(block + 8, block + 4, out->q);
    out->d = load16(block);
    out->m = load16(block + 2);
}

static void read_q8_0(const uint8_t *row, int64_t g, group *out) {
    const uint8_t *block = row + 34 * g;
    memcpy(out->q, block + 2, GROUP);
    out->d = load16(block);
    out->m = 0;
}

/* Scale d and minimum -m of group `i` of a Q4_K or Q5_K block: six bits each times a float16, of
 * groups 4 to 7 the two high ones above those of groups 0 to 3. */
static inline void k_scales(const uint8_t *block, int i, float *d, float *m) {
    const uint8_t *s = block + 4;
    int scale, minimum;
    if (i < 4) {
        scale = s[i] & 63;
        minimum = s[i + 4] & 63;
    } else {
        scale = (s[i + 4] & 15) | s[i - 4] >> 6 << 4;
        minimum = s[i + 4] >> 4 | s[i] >> 6 << 4;
    }
    *d = float_of_half(load16(block)) * (float)scale;
    *m = -(float_of_half(load16(block + 2)) * (float)minimum);
}

static inline void round_k_scales(const uint8_t *block, int i, group *out) {
    float d, m;
    k_scales(block, i, &d, &m);
    out->d = half_of_float(d);
    out->m = half_of_float(m);
}

static inline void scaled(const int8_t *q, float d, float m, float *values) {
    for (int i = 0; i < GROUP; i++) values[i] = (float)q[i] * d + m;
}

static inline void q4_k_quants(const uint8_t *block, int i, int8_t *q) {
    const uint8_t *pairs = block + 16 + i / 2 * GROUP;
    int shift = i % 2 ? 4 : 0;
    for (int j = 0; j < GROUP; j++) q[j] = (int8_t)(pairs[j] >> shift & 15);
}

static void read_q4_k(const uint8_t *row, int64_t g, group *out) {
    const uint8_t *block = row + 144 * (g / 8);
    q4_k_quants(block, (int)(g % 8), out->q);
    round_k_scales(block, (int)(g % 8), out);
}

static void q4_k_values(const uint8_t *row, int64_t g, float *values) {
    const uint8_t *block = row + 144 * (g / 8);
    int8_t q[GROUP];
    float d, m;
    q4_k_quants(block, (int)(g % 8), q);
    k_scales(block, (int)(g % 8), &d, &m);
    scaled(q, d, m, values);
}

static inline void q5_k_quants(const uint8_t *block, int i, int8_t *q) {
    const uint8_t *high = block + 16, *pairs = block + 48 + i / 2 * GROUP;
    int shift = i % 2 ? 4 : 0;
    for (int j = 0; j < GROUP; j++)
        q[j] = (int8_t)((pairs[j] >> shift & 15) | (high[j] >> i & 1) << 4);
}

static void read_q5_k(const uint8_t *row, int64_t g, group *out) {
    const uint8_t *block = row + 176 * (g / 8);
    q5_k_quants(block, (int)(g % 8), out->q);
    round_k_scales(block, (int)(g % 8), out);
}

static void q5_k_values(const uint8_t *row, int64_t g, float *values) {
    const uint8_t *block = row + 176 * (g / 8);
    int8_t q[GROUP];
    float d, m;
    q5_k_quants(block, (int)(g % 8), q);
    k_scales(block, (int)(g % 8), &d, &m);
    scaled(q, d, m, values);
}

/* q from -32 to 31, and the scale of each half: w = d * scale[i / 16] * q. Returns d. */
static inline float read_6_bits(const uint8_t *row, int64_t g, int8_t *q, const int8_t **scale) {
    const uint8_t *block = row + 210 * (g / 8);
    int half = (int)(g % 8 / 4), field = (int)(g % 4);
    const uint8_t *low = block + 64 * half + field % 2 * GROUP;
    const uint8_t *high = block + 128 + GROUP * half;
    int low_shift = field < 2 ? 0 : 4, high_shift = 2 * field;
    for (int i = 0; i < GROUP; i++)
        q[i] = (int8_t)(((low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4) - 32);
    *scale = (const int8_t *)block + 192 + g % 8 * 2;
    return float_of_half(load16(block + 208));
}

static inline int size_of(int value) { return value < 0 ? -value : value; }

/* The nearest integer, ties to even, 127 at most; for values below 2^22. */
static inline int8_t rounded(float value) {
    const float ones = 0x1.8p23f; /* its last bit is worth 1 */
    int32_t whole = (int32_t)(bits_of_float(value + ones) - bits_of_float(ones));
    return (int8_t)(whole < 127 ? whole : 127);
}

static inline void rescale_16(const int8_t *restrict q, float factor, int8_t *restrict out) {
    for (int i = 0; i < 16; i++) out[i] = rounded((float)q[i] * factor);
}

/* The half with the larger scale s as 4 q, exactly, with d s / 4 for a scale; the other half to
 * the nearest multiple of that: an eighth of a Q6_K step at most, a quarter at the end of the
 * range if the scales are opposite. */
static void read_q6_k(const uint8_t *row, int64_t g, group *out) {
    const int8_t *scale;
    int8_t q[GROUP];
    float d = read_6_bits(row, g, q, &scale);
    int larger = size_of(scale[0]) < size_of(scale[1]);
    float unit = scale[larger] ? 4.0f / (float)scale[larger] : 0.0f;
    for (int half = 0; half < 2; half++)
        rescale_16(q + 16 * half, (float)scale[half] * unit, out->q + 16 * half);
    out->d = half_of_float(d * (float)scale[larger] * 0.25f);
    out->m = 0;
}

static void q6_k_values(const uint8_t *row, int64_t g, float *values) {
    const int8_t *scale;
    int8_t q[GROUP];
    float d = read_6_bits(row, g, q, &scale);
    float factors[2] = {d * (float)scale[0], d * (float)scale[1]};
    for (int i = 0; i < GROUP; i++) values[i] = factors[i / 16] * (float)q[i];
}

static void f32_values(const uint8_t *row, int64_t g, float *values) {
    memcpy(values, row + 4 * GROUP * g, sizeof *values * GROUP);
}

static void f16_values(const uint8_t *row, int64_t g, float *values) {
    uint16_t halves[GROUP];
    memcpy(halves, row + 2 * GROUP * g, sizeof halves);
    for (int i = 0; i < GROUP; i++) values[i] = float_of_half(halves[i]);
}

static void bf16_values(const uint8_t *row, int64_t g, float *values) {
    uint16_t halves[GROUP];
    memcpy(halves, row + 2 * GROUP * g, sizeof halves);
    for (int i = 0; i < GROUP; i++) values[i] = float_of_bits((uint32_t)halves[i] << 16);
}

/* To 8 bits, by the float16 next to a 127th of the largest. Infinities, NaNs and what is beyond
 * such scales make NaNs of the group. */
static void quantize(const float *values, group *out) {
    int32_t largest = 0;
    for (int i = 0; i < GROUP; i++) {
        int32_t size = (int32_t)(bits_of_float(values[i]) & 0x7fffffff);
        largest = size > largest ? size : largest;
    }
    float end = float_of_bits((uint32_t)largest);
    out->m = 0;
    if (!(end <= 127.0f * 65504.0f)) {
        memset(out->q, 0, GROUP);
        out->d = 0x7e00;
        return;
    }
    out->d = half_of_float(end / 127.0f);
    /* A subnormal scale may be rounded down too far for the largest weight. */
    if (float_of_half(out->d) * 127.5f < end) out->d++;
    float inverse = out->d ? 1.0f / float_of_half(out->d) : 0.0f;
    for (int i = 0; i < GROUP; i++) out->q[i] = rounded(values[i] * inverse);
}

typedef void read_group(const uint8_t *row, int64_t g, group *out);
typedef void read_values(const uint8_t *row, int64_t g, float *values);

/* Readers of a kind; NULL where it takes quantizing its values. */
typedef struct {
    int32_t block_columns, block_bytes;
    read_group *nibbles;   /* q from 0 to 15 */
    read_group *bytes;     /* q of 8 bits */
    read_group *symmetric; /* q of 8 bits, m = 0 */
    read_values *values;   /* NULL: q * d + m */
} kind;

static const kind KINDS[] = {
    [LLMRT_SOURCE_F32] = {1, 4, NULL, NULL, NULL, f32_values},
    [LLMRT_SOURCE_F16] = {1, 2, NULL, NULL, NULL, f16_values},
    [LLMRT_SOURCE_BF16] = {1, 2, NULL, NULL, NULL, bf16_values},
    [LLMRT_SOURCE_Q4_0] = {32, 18, read_q4_0, read_q4_0_signed, read_q4_0_signed, NULL},
    [LLMRT_SOURCE_Q4_1] = {32, 20, read_q4_1, read_q4_1, NULL, NULL},
    [LLMRT_SOURCE_Q5_0] = {32, 22, NULL, read_q5_0, read_q5_0, NULL},
    [LLMRT_SOURCE_Q5_1] = {32, 24, NULL, read_q5_1, NULL, NULL},
    [LLMRT_SOURCE_Q8_0] = {32, 34, NULL, read_q8_0, read_q8_0, NULL},
    [LLMRT_SOURCE_Q4_K] = {256, 144, read_q4_k, read_q4_k, NULL, q4_k_values},
    [LLMRT_SOURCE_Q5_K] = {256, 176, NULL, read_q5_k, NULL, q5_k_values},
    [LLMRT_SOURCE_Q6_K] = {256, 210, NULL, read_q6_k, read_q6_k, q6_k_values},
};

enum { NUM_KINDS = sizeof KINDS / sizeof *KINDS };

static void load_values(const kind *from, const uint8_t *row, int64_t g, float *values) {
    if (from->values) {
        from->values(row, g, values);
        return;
    }
    group read;
    from->bytes(row, g, &read);
    scaled(read.q, float_of_half(read.d), float_of_half(read.m), values);
}

static inline uint16_t bf16_of_float(float value) {
    uint32_t bits = bits_of_float(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Row `r` of a group of a strip, at `out`. */
static inline void write_group(const group *from, int64_t format, int r, uint8_t *out) {
    uint32_t quads[QUADS];
    memcpy(quads, from->q, sizeof quads);
    int num_words = QUADS;
    if (format == LLMRT_Q4 || format == LLMRT_Q4M) {
        num_words = QUADS / 2;
        for (int i = 0; i < num_words; i++) quads[i] = quads[2 * i] | quads[2 * i + 1] << 4;
    }
    for (int i = 0; i < num_words; i++) memcpy(out + 4 * (STRIP * i + r), quads + i, 4);
    uint8_t *scales = out + 4 * STRIP * num_words;
    memcpy(scales + 2 * r, &from->d, 2);
    if (has_minimum(format)) memcpy(scales + 2 * (STRIP + r), &from->m, 2);
}

/* `num_rows` rows of `row_bytes` bytes as integers; `read` is NULL if they must be quantized. */
static void pack_integers(const kind *from, read_group *read, const uint8_t *rows, int num_rows,
                          int64_t row_bytes, int64_t columns, int64_t format, uint8_t *out) {
    for (int64_t g = 0; g < columns / GROUP; g++, out += group_bytes(format))
        for (int r = 0; r < num_rows; r++) {
            const uint8_t *row = rows + r * row_bytes;
            group taken;
            if (read) {
                read(row, g, &taken);
            } else {
                float values[GROUP];
                load_values(from, row, g, values);
                quantize(values, &taken);
            }
            write_group(&taken, format, r, out);
        }
}

static void pack_floats(const kind *from, const uint8_t *rows, int num_rows, int64_t row_bytes,
                        int64_t columns, int64_t format, uint8_t *out) {
    float values[STRIP][GROUP];
    memset(values, 0, sizeof values);
    for (int64_t g = 0; g < columns / GROUP; g++, out += group_bytes(format)) {
        for (int r = 0; r < num_rows; r++) load_values(from, rows + r * row_bytes, g, values[r]);
        for (int c = 0; c < GROUP; c++)
            for (int r = 0; r < STRIP; r++) {
                uint16_t bits = bf16_of_float(values[r][c]);
                if (format == LLMRT_BF16)
                    memcpy(out + 2 * (STRIP * c + r), &bits, sizeof bits);
                else
                    memcpy(out + 4 * (STRIP * c + r), &values[r][c], sizeof values[r][c]);
            }
    }
}

static int can_become(const kind *from, int64_t format) {
    if (format == LLMRT_Q4) return from->nibbles == read_q4_0;
    return format != LLMRT_Q4M || from->nibbles;
}

/* The reader of integers for a format; NULL: quantize. */
static read_group *reader(const kind *from, int64_t format) {
    if (format == LLMRT_Q4 || format == LLMRT_Q4M) return from->nibbles;
    return format == LLMRT_Q8M ? from->bytes : from->symmetric;
}

int64_t llmrt_packed_bytes(int64_t rows, int64_t columns, int64_t format) {
    const int64_t most = 1 << 30; /* so that no product overflows */
    if (rows < 1 || rows > most || columns < GROUP || columns > most || columns % GROUP) return -1;
    if (format < 0 || format >= LLMRT_NUM_FORMATS) return -1;
    return (rows + STRIP - 1) / STRIP * strip_bytes(columns, format);
}

int llmrt_pack(int64_t source_kind, const uint8_t *source, int64_t rows, int64_t columns,
               int64_t format, uint8_t *packed, int64_t step) {
    if (source_kind < 0 || source_kind >= NUM_KINDS || step < 1) return -1;
    const kind *from = &KINDS[source_kind];
    if (llmrt_packed_bytes(rows, columns, format) < 0 || columns % from->block_columns) return -1;
    if (!can_become(from, format)) return -1;
    read_group *read = reader(from, format);
    int64_t row_bytes = columns / from->block_columns * from->block_bytes;
    int64_t bytes = strip_bytes(columns, format), used = columns / GROUP * group_bytes(format);
    for (int64_t first = 0; first < rows; first += STRIP, packed += step * bytes) {
        int num_rows = rows - first < STRIP ? (int)(rows - first) : STRIP;
        const uint8_t *start = source + first * row_bytes;
        memset(packed + used, 0, (size_t)(bytes - used));
        if (num_rows < STRIP) memset(packed, 0, (size_t)used);
        if (format == LLMRT_BF16 || format == LLMRT_F32)
            pack_floats(from, start, num_rows, row_bytes, columns, format, packed);
        else
            pack_integers(from, read, start, num_rows, row_bytes, columns, format, packed);
    }
    return 0;
}
