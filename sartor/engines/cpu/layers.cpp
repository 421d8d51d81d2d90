// A dense layer with few outputs, cross-entropy over few classes, and the update of a network, for
// lanes on the cores of a CPU.
//
// Libraries are built for large sides; with the ten classes of a client's model one side is tiny.
// Lanes and rows are shared by threads (without OpenMP there is one), and the order of all sums is
// fixed: the numbers of a lane are the same to the bit whatever lanes and threads it shares.

#include <cmath>

#include "vectors.h"

#ifdef __AVX__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int ROWS = 4, TALL = 6;  // that are in registers at once
#else
constexpr int ROWS = 2, TALL = 2;
#endif
constexpr int COLUMNS = 5;  // of the tiny side, in registers at once

// A vector of which the first numbers count as zeros: they were added before.
template <typename T>
inline wide<T> load_rest(const T* at, int64_t counted) {
    wide<T> number;
    for (int i = 0; i < WIDE<T>; i++) number[i] = T(i);
    return number >= wide<T>{} + T(counted) ? load(at) : wide<T>{};
}

// The sum of a vector: halves are added until two numbers are left.
template <typename T, int N>
inline T total(typename vector_of<T, N>::type value) {
    if constexpr (N == 2) {
        return value[0] + value[1];
    } else {
        typename vector_of<T, N / 2>::type low, high;
        std::memcpy(&low, &value, sizeof low);
        std::memcpy(&high, reinterpret_cast<const char*>(&value) + sizeof low, sizeof high);
        return total<T, N / 2>(low + high);
    }
}

// x (rows, depth) times the transpose of w (columns, depth), plus a row; rows of both have no gaps.
struct Sizes {
    int64_t lanes, rows, columns, depth;
    int64_t x_lane, x_row, w_lane, w_row, b_lane;  // strides
};

// M rows with N columns; the depth is at least WIDE.
template <typename T, int M, int N>
inline void dots_of(const Sizes& s, const T* x, const T* w, const T* bias, T* out) {
    wide<T> sum[M][N] = {};
    const int64_t whole = s.depth - s.depth % WIDE<T>;
    for (int64_t k = 0; k < whole; k += WIDE<T>) {
        wide<T> value[M];
        for (int m = 0; m < M; m++) value[m] = load(x + m * s.x_row + k);
        for (int n = 0; n < N; n++) {
            const wide<T> other = load(w + n * s.w_row + k);
            for (int m = 0; m < M; m++) sum[m][n] += value[m] * other;
        }
    }
    if (whole < s.depth) {
        const int64_t k = s.depth - WIDE<T>, counted = whole - k;
        wide<T> value[M];
        for (int m = 0; m < M; m++) value[m] = load_rest(x + m * s.x_row + k, counted);
        for (int n = 0; n < N; n++) {
            const wide<T> other = load_rest(w + n * s.w_row + k, counted);
            for (int m = 0; m < M; m++) sum[m][n] += value[m] * other;
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++)
            out[m * s.columns + n] = total<T, WIDE<T>>(sum[m][n]) + (bias ? bias[n] : T(0));
}

template <typename T, int N>
void dots_with(const Sizes& s, const T* x, const T* w, const T* bias, T* out) {
    int64_t m = 0;
    for (; m + ROWS <= s.rows; m += ROWS)
        dots_of<T, ROWS, N>(s, x + m * s.x_row, w, bias, out + m * s.columns);
    for (; m < s.rows; m++) dots_of<T, 1, N>(s, x + m * s.x_row, w, bias, out + m * s.columns);
}

template <typename T>
void dots(const Sizes& s, const T* x, const T* w, const T* bias, T* out) {
    in_shares<COLUMNS>(s.columns, [&](auto columns, int64_t n) {
        dots_with<T, columns>(s, x, w + n * s.w_row, bias ? bias + n : nullptr, out + n);
    });
}

template <typename T>
void every_lane(const int64_t* n, int threads, const T* x, const T* w, const T* bias, T* out) {
    const Sizes s = {n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8]};
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t lane = 0; lane < s.lanes; lane++)
        dots<T>(s, x + lane * s.x_lane, w + lane * s.w_lane, bias ? bias + lane * s.b_lane : bias,
                out + lane * s.rows * s.columns);
}

// a (rows, depth) times b (depth, columns) where the depth is short, as in the gradient of a layer's
// weights; out has no gaps, and rows of b have none. With `now`, out = now + factor times that.
struct Outer {
    int64_t lanes, rows, columns, depth;
    int64_t a_lane, a_row, a_column, b_lane, b_row, now_lane;  // strides
    bool large;  // out is written past the caches
};

template <typename T>
inline T moved(T a, T factor, T b) {
#ifdef __FMA__
    return std::fma(factor, b, a);
#else
    return a + factor * b;
#endif
}

// Store a vector past the caches: nothing is read for it, and nothing pushed out.
template <typename T>
inline void stream(T* to, const wide<T>& value) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)value);
#elif defined(__AVX__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)value);
#else
    std::memcpy(to, &value, sizeof value);
#endif
}

template <typename T>
inline void put(T* to, const wide<T>& value, bool large) {
    if (large && reinterpret_cast<uintptr_t>(to) % BYTES == 0)
        stream<T>(to, value);
    else
        std::memcpy(to, &value, sizeof value);
}

// M rows with N vectors of columns.
template <typename T, int M, int N>
inline void outer_of(const Outer& s, const T* a, const T* b, const T* now, T factor, T* out) {
    wide<T> sum[M][N] = {};
    if (now)
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++) __builtin_prefetch(now + m * s.columns + n * WIDE<T>);
    for (int64_t k = 0; k < s.depth; k++) {
        wide<T> value[N];
        for (int n = 0; n < N; n++) value[n] = load(b + k * s.b_row + n * WIDE<T>);
        for (int m = 0; m < M; m++) {
            const T scale = a[m * s.a_row + k * s.a_column];
            for (int n = 0; n < N; n++) sum[m][n] += value[n] * scale;
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            const int64_t at = m * s.columns + n * WIDE<T>;
            wide<T> value = sum[m][n];
            if (now) {
                const wide<T> from = load(now + at);
                for (int i = 0; i < WIDE<T>; i++) value[i] = moved(from[i], factor, sum[m][n][i]);
            }
            put<T>(out + at, value, s.large);
        }
}

template <typename T, int N>
void outer_with(const Outer& s, const T* a, const T* b, const T* now, T factor, T* out) {
    int64_t m = 0;
    for (; m + TALL <= s.rows; m += TALL)
        outer_of<T, TALL, N>(s, a + m * s.a_row, b, now ? now + m * s.columns : now, factor,
                             out + m * s.columns);
    for (; m < s.rows; m++)
        outer_of<T, 1, N>(s, a + m * s.a_row, b, now ? now + m * s.columns : now, factor,
                          out + m * s.columns);
}

template <typename T>
void outer(const int64_t* n, int threads, const T* a, const T* b, const T* now, const T* factors,
           T* out) {
    const Outer s = {n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10] != 0};
    constexpr int64_t FOUR = 4 * WIDE<T>;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t lane = 0; lane < s.lanes; lane++) {
        const T* left = a + lane * s.a_lane;
        const T* right = b + lane * s.b_lane;
        const T* from = now ? now + lane * s.now_lane : nullptr;
        const T factor = now ? factors[lane] : T(0);
        T* to = out + lane * s.rows * s.columns;
        int64_t c = 0;
        for (; c + FOUR <= s.columns; c += FOUR)
            outer_with<T, 4>(s, left, right + c, from ? from + c : from, factor, to + c);
        for (; c < s.columns; c += WIDE<T>) {  // the last vector may overlap the one before
            const int64_t at = c + WIDE<T> <= s.columns ? c : s.columns - WIDE<T>;
            outer_with<T, 1>(s, left, right + at, from ? from + at : from, factor, to + at);
        }
#ifdef __AVX__
        if (s.large) _mm_sfence();
#endif
    }
}

// Losses -log softmax at the labels of rows (rows, classes); or, given slopes of the losses, the
// gradient of the scores. A row whose label is `ignored` has the loss and the gradient zero.
// Returns whether all labels are classes.
template <typename T>
bool entropy(int64_t rows, int64_t classes, int64_t ignored, int threads, const T* scores,
             const int64_t* labels, const T* slopes, T* out) {
    bool sound = true;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1) reduction(&& : sound)
    for (int64_t row = 0; row < rows; row++) {
        const T* s = scores + row * classes;
        const int64_t label = labels[row];
        const bool counts = label != ignored;
        if (counts && (label < 0 || label >= classes)) {
            sound = false;
            continue;
        }
        T top = s[0], sum = 0;
        for (int64_t c = 1; c < classes; c++) top = s[c] > top || s[c] != s[c] ? s[c] : top;
        if (!slopes) {
            for (int64_t c = 0; c < classes; c++) sum += std::exp(s[c] - top);
            out[row] = counts ? std::log(sum) + (top - s[label]) : T(0);
            continue;
        }
        T* o = out + row * classes;
        for (int64_t c = 0; c < classes; c++) sum += o[c] = std::exp(s[c] - top);
        const T slope = counts ? slopes[row] : T(0), share = slope / sum;
        for (int64_t c = 0; c < classes; c++) o[c] = counts ? o[c] * share : T(0);
        if (counts) o[label] -= slope;
    }
    return sound;
}

template <typename T>
void move(int64_t count, const T* a, const T* b, T factor, bool large, T* out) {
    int64_t i = 0;
    if (large) {
        for (; i < count && reinterpret_cast<uintptr_t>(out + i) % BYTES; i++)
            out[i] = moved(a[i], factor, b[i]);
        for (; i + WIDE<T> <= count; i += WIDE<T>) {
            const wide<T> from = load(a + i), along = load(b + i);
            wide<T> value;
            for (int k = 0; k < WIDE<T>; k++) value[k] = moved(from[k], factor, along[k]);
            stream<T>(out + i, value);
        }
    }
    for (; i < count; i++) out[i] = moved(a[i], factor, b[i]);
#ifdef __AVX__
    if (large) _mm_sfence();
#endif
}

// a + factor * b for lanes (lanes, size) with steps between them; out has no gaps.
template <typename T>
void update(int64_t lanes, int64_t size, int64_t a_lane, int64_t b_lane, bool large, int threads,
            const T* a, const T* b, const T* factors, T* out) {
    constexpr int64_t BLOCK = 1 << 14;
    const int64_t blocks = (size + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && lanes * size > BLOCK)
    for (int64_t k = 0; k < lanes * blocks; k++) {
        const int64_t lane = k / blocks, first = k % blocks * BLOCK;
        const int64_t count = size - first < BLOCK ? size - first : BLOCK;
        move<T>(count, a + lane * a_lane + first, b + lane * b_lane + first, factors[lane], large,
                out + lane * size + first);
    }
}

}  // namespace

#define FORMS(NAME, T)                                                                          \
    extern "C" void update_##NAME(const int64_t* n, int threads, const T* a, const T* b,        \
                                  const T* factors, T* out) {                                   \
        update<T>(n[0], n[1], n[2], n[3], n[4] != 0, threads, a, b, factors, out);              \
    }                                                                                           \
    extern "C" void dense_##NAME(const int64_t* n, int threads, const T* x, const T* w,         \
                                 const T* bias, T* out) {                                       \
        every_lane<T>(n, threads, x, w, bias, out);                                             \
    }                                                                                           \
    extern "C" void outer_##NAME(const int64_t* n, int threads, const T* a, const T* b,         \
                                 const T* now, const T* factors, T* out) {                      \
        outer<T>(n, threads, a, b, now, factors, out);                                          \
    }                                                                                           \
    extern "C" int entropy_##NAME(const int64_t* n, int threads, const T* scores,               \
                                  const int64_t* labels, const T* slopes, T* out) {             \
        return entropy<T>(n[0], n[1], n[2], threads, scores, labels, slopes, out);              \
    }

FORMS(float, float)
FORMS(double, double)
