// What memory asks of whoever gathers rows: the rows alone, and with one line of an index before each. Random places, known ahead,
// fetched in blocks as the tables do it. gcc -O3 -march=native -fno-math-errno -shared
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 32 };

static void fetch(const float *row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(row + d);
}

// out[n, dim] = rows[places]
void gather(const float *rows, int64_t dim, const int64_t *places, int64_t n, float *out) {
    for (int64_t at = 0; at < n; at += BLOCK) {
        int64_t end = at + BLOCK < n ? at + BLOCK : n;
        for (int64_t i = at; i < end; ++i) fetch(rows + places[i] * dim, dim);
        for (int64_t i = at; i < end; ++i) memcpy(out + i * dim, rows + places[i] * dim, (size_t)dim * sizeof(float));
    }
}

// The same, and the place of each row is read from a line of 64 bytes: lines[n_lines, 8], of which the first word is the place. Rows
// begin every `stride` floats: what lies between them is state that nobody reads.
void gather_by_lines(const float *rows, int64_t dim, int64_t stride, const int64_t *lines, const int64_t *at_line, int64_t n, float *out) {
    int64_t places[BLOCK];
    for (int64_t at = 0; at < n; at += BLOCK) {
        int64_t end = at + BLOCK < n ? at + BLOCK : n;
        for (int64_t i = at; i < end; ++i) __builtin_prefetch(lines + 8 * at_line[i]);
        for (int64_t i = at; i < end; ++i) {
            places[i - at] = lines[8 * at_line[i]];
            fetch(rows + places[i - at] * stride, dim);
        }
        for (int64_t i = at; i < end; ++i) memcpy(out + i * dim, rows + places[i - at] * stride, (size_t)dim * sizeof(float));
    }
}

// weights[places] and the state beside them read, changed, written: what an update moves. gradients[n, dim]
void update(float *rows, int64_t dim, const int64_t *places, int64_t n, const float *gradients) {
    for (int64_t at = 0; at < n; at += BLOCK) {
        int64_t end = at + BLOCK < n ? at + BLOCK : n;
        for (int64_t i = at; i < end; ++i) fetch(rows + places[i] * 2 * dim, 2 * dim);
        for (int64_t i = at; i < end; ++i) {
            float *row = rows + places[i] * 2 * dim;
            const float *g = gradients + i * dim;
            for (int64_t d = 0; d < dim; ++d) {
                row[d] += g[d];
                row[dim + d] += g[d];
            }
        }
    }
}

// Read the place of each of n rows from its line of an index, and fetch the rows.
static void look_up(float *rows, int64_t width, const int64_t *lines, const int64_t *at_line, int64_t n,
                    int64_t *places) {
    for (int64_t i = 0; i < n; ++i) __builtin_prefetch(lines + 8 * at_line[i]);
    for (int64_t i = 0; i < n; ++i) {
        places[i] = lines[8 * at_line[i]];
        fetch(rows + places[i] * width, width);
    }
}

// The arithmetic of Adagrad on rows whose places are in an index: rows[n, 2, dim], weights and sums
// of squares.
void update_adagrad(float *rows, int64_t dim, const int64_t *lines, const int64_t *at_line, int64_t n,
                    const float *gradients) {
    int64_t places[BLOCK];
    for (int64_t at = 0; at < n; at += BLOCK) {
        int64_t end = at + BLOCK < n ? at + BLOCK : n;
        look_up(rows, 2 * dim, lines, at_line + at, end - at, places);
        for (int64_t i = at; i < end; ++i) {
            float *restrict w = rows + places[i - at] * 2 * dim;
            const float *restrict g = gradients + i * dim;
            for (int64_t d = 0; d < dim; ++d) {
                w[dim + d] += g[d] * g[d];
                w[d] -= 0.01f * g[d] / (sqrtf(w[dim + d]) + 1e-10f);
            }
        }
    }
}

// The arithmetic of Adam: rows[n, 3, dim], weights and both moments.
void update_adam(float *rows, int64_t dim, const int64_t *lines, const int64_t *at_line, int64_t n,
                    const float *gradients) {
    int64_t places[BLOCK];
    for (int64_t at = 0; at < n; at += BLOCK) {
        int64_t end = at + BLOCK < n ? at + BLOCK : n;
        look_up(rows, 3 * dim, lines, at_line + at, end - at, places);
        for (int64_t i = at; i < end; ++i) {
            float *restrict w = rows + places[i - at] * 3 * dim;
            const float *restrict g = gradients + i * dim;
            for (int64_t d = 0; d < dim; ++d) {
                w[dim + d] += 0.1f * (g[d] - w[dim + d]);
                w[2 * dim + d] = 0.999f * w[2 * dim + d] + 0.001f * g[d] * g[d];
                w[d] -= 0.01f * w[dim + d] / (sqrtf(w[2 * dim + d]) + 1e-8f);
            }
        }
    }
}
