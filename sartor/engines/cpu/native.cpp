// Convolutions and poolings of one core, for images whose batch is the last axis: (C, H, W, B);
// and draws of normal numbers.
//
// Every loop runs over neighbouring samples, so vector registers are full whatever the channels and
// the kernel. B is at least LANES; where it is no multiple, the last vector overlaps the one before.
// The order of all sums is fixed.

#include "vectors.h"

namespace {

constexpr int LANES = 8;
constexpr int64_t NEAR = 65536;  // bytes that a second cache holds beside other things

template <typename T>
using vec = typename vector_of<T, LANES>::type;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

struct Shape {
    int64_t batch, channels, height, width, outputs, kernel_h, kernel_w, pad_h, pad_w;
    int64_t rows() const { return height + 2 * pad_h - kernel_h + 1; }
    int64_t columns() const { return width + 2 * pad_w - kernel_w + 1; }
};

// OUT neighbouring output channels at one position, for N vectors of samples.
// weight: (C, kh, kw, OUT)
template <typename T, int OUT, int N>
inline void position(const Shape& s, const T* x, const T* weight, const T* bias, T* out,
                     int64_t plane, int64_t row, int64_t column) {
    vec<T> sum[OUT][N];
    for (int o = 0; o < OUT; o++)
        for (int n = 0; n < N; n++) sum[o][n] = vec<T>{} + (bias ? bias[o] : T(0));
    const int64_t top = row - s.pad_h, left = column - s.pad_w;
    const int64_t kh_from = most(0, -top), kh_to = least(s.kernel_h, s.height - top);
    const int64_t kw_from = most(0, -left), kw_to = least(s.kernel_w, s.width - left);
    for (int64_t c = 0; c < s.channels; c++)
        for (int64_t kh = kh_from; kh < kh_to; kh++) {
            const T* from = x + ((c * s.height + top + kh) * s.width + left + kw_from) * s.batch;
            const T* w = weight + ((c * s.kernel_h + kh) * s.kernel_w + kw_from) * OUT;
            for (int64_t kw = kw_from; kw < kw_to; kw++, from += s.batch, w += OUT) {
                vec<T> value[N];
                for (int n = 0; n < N; n++) value[n] = load<LANES>(from + n * LANES);
                for (int o = 0; o < OUT; o++)
                    for (int n = 0; n < N; n++) sum[o][n] += value[n] * w[o];
            }
        }
    for (int o = 0; o < OUT; o++)
        for (int n = 0; n < N; n++)
            store(out + o * plane + n * LANES, sum[o][n]);
}

template <typename T, int OUT>
void some_outputs(const Shape& s, const T* x, const T* weight, const T* bias, T* out) {
    const int64_t rows = s.rows(), columns = s.columns(), plane = rows * columns * s.batch;
    for (int64_t row = 0; row < rows; row++) {
        int64_t b = 0;
        for (; b + 2 * LANES <= s.batch; b += 2 * LANES)
            for (int64_t column = 0; column < columns; column++)
                position<T, OUT, 2>(s, x + b, weight, bias,
                                    out + (row * columns + column) * s.batch + b, plane, row, column);
        for (; b < s.batch; b += LANES) {
            const int64_t at = least(b, s.batch - LANES);
            for (int64_t column = 0; column < columns; column++)
                position<T, OUT, 1>(s, x + at, weight, bias,
                                    out + (row * columns + column) * s.batch + at, plane, row, column);
        }
    }
}

// weight: (O, C, kh, kw); scratch: as large.
template <typename T>
void convolve(const Shape& s, const T* x, const T* weight, const T* bias, T* out, T* scratch) {
    const int64_t taps = s.channels * s.kernel_h * s.kernel_w;
    const int64_t plane = s.rows() * s.columns() * s.batch;
    for (int64_t o = 0; o < s.outputs;) {
        const int64_t left = s.outputs - o;
        const int64_t take = left >= 8 ? 8 : left;
        for (int64_t t = 0; t < taps; t++)
            for (int64_t i = 0; i < take; i++) scratch[t * take + i] = weight[(o + i) * taps + t];
        const T* b = bias ? bias + o : nullptr;
        T* to = out + o * plane;
        with_constant<8>(take, [&](auto n) { some_outputs<T, n>(s, x, scratch, b, to); });
        o += take;
    }
}

template <typename T>
using mask = decltype(vec<T>{} < vec<T>{});

// True but for the first samples.
template <typename T>
inline mask<T> all_but(int64_t count) {
    vec<T> number;
    for (int n = 0; n < LANES; n++) number[n] = T(n);
    return number >= vec<T>{} + T(count);
}

// Adds the products of OUT gradients with TAPS neighbouring inputs. REST: the first samples of the
// vector were counted before.
template <typename T, int OUT, int TAPS, bool REST>
inline void products(const T* x, const T* grad, int64_t plane, int64_t batch, const mask<T>& fresh,
                     vec<T> (&sum)[OUT][TAPS]) {
    vec<T> value[TAPS];
    for (int k = 0; k < TAPS; k++) value[k] = load<LANES>(x + k * batch);
    for (int o = 0; o < OUT; o++) {
        vec<T> g = load<LANES>(grad + o * plane);
        if (REST) g = fresh ? g : vec<T>{};
        for (int k = 0; k < TAPS; k++) sum[o][k] += g * value[k];
    }
}

// Some neighbouring positions, of some neighbouring rows.
struct Tile {
    int64_t rows, columns, batch;
    int64_t x_row, grad_row;  // from one row to the next
    int64_t plane, next;      // from one output to the next, in gradients and in sums
};

// The sums over a tile, for OUT outputs and TAPS neighbouring columns of the kernel.
template <typename T, int OUT, int TAPS>
inline void tile_sums(const Tile& t, const T* x, const T* grad, T* total) {
    vec<T> sum[OUT][TAPS] = {};
    const int64_t batch = t.batch, plane = t.plane, columns = t.columns;
    const int64_t whole = batch - batch % LANES;
    const mask<T> fresh = all_but<T>(LANES - (batch - whole));
    for (int64_t row = 0; row < t.rows; row++, x += t.x_row, grad += t.grad_row) {
        if (whole == batch) {  // neighbouring positions are neighbours in memory
            for (int64_t i = 0; i < columns * batch; i += LANES)
                products<T, OUT, TAPS, false>(x + i, grad + i, plane, batch, fresh, sum);
            continue;
        }
        for (int64_t column = 0; column < columns; column++) {
            const T* from = x + column * batch;
            const T* g = grad + column * batch;
            for (int64_t b = 0; b < whole; b += LANES)
                products<T, OUT, TAPS, false>(from + b, g + b, plane, batch, fresh, sum);
            products<T, OUT, TAPS, true>(from + batch - LANES, g + batch - LANES, plane, batch,
                                         fresh, sum);
        }
    }
    for (int o = 0; o < OUT; o++)
        for (int k = 0; k < TAPS; k++) {
            T* to = total + o * t.next + k * LANES;
            store(to, load<LANES>(to) + sum[o][k]);
        }
}

template <typename T, int OUT>
inline void row_of_taps(int64_t taps, const Tile& t, const T* x, const T* grad, T* total) {
    constexpr int MOST = OUT > 4 ? 3 : 5;  // sums that fit into registers
    for (int64_t k = 0; k < taps;) {
        const T* from = x + k * t.batch;
        T* to = total + k * LANES;
        const int64_t left = taps - k, take = left >= MOST ? MOST : least(left, 3);
        with_constant<MOST>(take, [&](auto n) { tile_sums<T, OUT, n>(t, from, grad, to); });
        k += take;
    }
}

// x without padding; weight: (O, C, kh, kw); scratch: O·C·kh·kw·LANES zeros.
template <typename T>
void kernel_gradient(const Shape& s, const T* x, const T* grad, T* weight, T* bias, T* scratch) {
    const int64_t rows = s.rows(), columns = s.columns(), plane = rows * columns * s.batch;
    const int64_t taps = s.channels * s.kernel_h * s.kernel_w, next = taps * LANES;
    // Tiles whose gradients stay in the second cache while all taps of the kernel read them.
    const int64_t wide = s.kernel_w <= 3 ? 8 : 4;
    const int64_t positions = most(1, int64_t(NEAR / sizeof(T)) / (wide * s.batch));
    const int64_t tall = most(1, positions / columns), across = least(columns, positions);
    for (int64_t top = 0; top < rows; top += tall)
        for (int64_t left = 0; left < columns; left += across) {
            const Tile t = {least(tall, rows - top), least(across, columns - left), s.batch,
                            s.width * s.batch, columns * s.batch, plane, next};
            for (int64_t o = 0; o < s.outputs;) {
                const int64_t rest = s.outputs - o, k = s.kernel_w;
                const int64_t take = rest >= wide ? wide : rest >= 4 ? 4 : rest;
                const T* g = grad + o * plane + (top * columns + left) * s.batch;
                for (int64_t c = 0; c < s.channels; c++)
                    for (int64_t kh = 0; kh < s.kernel_h; kh++) {
                        const T* from =
                            x + ((c * s.height + top + kh) * s.width + left) * s.batch;
                        T* to = scratch + o * next + (c * s.kernel_h + kh) * s.kernel_w * LANES;
                        if (take == 8)
                            row_of_taps<T, 8>(k, t, from, g, to);
                        else
                            with_constant<4>(take, [&](auto n) {
                                row_of_taps<T, n>(k, t, from, g, to);
                            });
                    }
                o += take;
            }
        }
    for (int64_t i = 0; i < s.outputs * taps; i++) {
        T sum = 0;
        for (int n = 0; n < LANES; n++) sum += scratch[i * LANES + n];
        weight[i] = sum;
    }
    for (int64_t o = 0; o < s.outputs; o++) {
        T sum = 0;
        for (int64_t row = 0; row < rows; row++) {
            vec<T> part = {};
            const T* from = grad + o * plane + row * columns * s.batch;
            const int64_t count = columns * s.batch, whole = count - count % LANES;
            for (int64_t i = 0; i < whole; i += LANES) part += load<LANES>(from + i);
            for (int n = 0; n < LANES; n++) sum += part[n];
            for (int64_t i = whole; i < count; i++) sum += from[i];
        }
        bias[o] = sum;
    }
}

// The largest of every window; of equal ones the first in reading order gets the gradient.
// KERNEL: height and width of windows that are known when this is compiled, 0 for others.
template <typename T, bool GRAD, int KERNEL>
void pool(int64_t planes, int64_t height, int64_t width, int64_t batch, int64_t given_h,
          int64_t given_w, const T* x, const T* grad, T* out) {
    const int64_t kernel_h = KERNEL ? KERNEL : given_h, kernel_w = KERNEL ? KERNEL : given_w;
    const int64_t rows = height / kernel_h, columns = width / kernel_w;
    for (int64_t p = 0; p < planes; p++)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t column = 0; column < columns; column++) {
                const int64_t first =
                    ((p * height + row * kernel_h) * width + column * kernel_w) * batch;
                const int64_t here = ((p * rows + row) * columns + column) * batch;
                for (int64_t start = 0; start < batch; start += LANES) {
                    const int64_t b = least(start, batch - LANES);
                    vec<T> best = load<LANES>(x + first + b), place = {};
                    for (int64_t i = 1; i < kernel_h * kernel_w; i++) {
                        const vec<T> value =
                            load<LANES>(x + first + (i / kernel_w * width + i % kernel_w) * batch + b);
                        const auto stays = (value <= best) | (best != best);  // not a number stays
                        best = stays ? best : value;
                        if (GRAD) place = stays ? place : vec<T>{} + T(i);
                    }
                    if (!GRAD) store(out + here + b, best);
                    if (GRAD) {
                        const vec<T> g = load<LANES>(grad + here + b), none = {};
                        for (int64_t i = 0; i < kernel_h * kernel_w; i++) {
                            const auto won = place == vec<T>{} + T(i);
                            store(out + first + (i / kernel_w * width + i % kernel_w) * batch + b,
                                  won ? g : none);
                        }
                    }
                }
            }
}

// ---- normal numbers ----------------------------------------------------------------------------
//
// The same numbers as sartor.core.rng.normal: Philox4x32-10, then the rule of Box and Muller in double.
// Logarithm, cosine and sine are series with an error of about one unit in the last place, for the
// arguments that occur here: u = (word + 1/2) / 2^32, and angles in (0, 2 pi).

typedef vec<double> doubles;
typedef uint64_t words __attribute__((vector_size(LANES * sizeof(uint64_t)), aligned(8)));

template <typename To, typename From>
inline To as(const From& bits) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

// Replaces the words of LANES counters by what ten rounds make of them.
inline void philox(uint32_t k0, uint32_t k1, words (&c)[4]) {
    constexpr uint64_t MASK = 0xFFFFFFFF, TIMES_0 = 0xD2511F53, TIMES_1 = 0xCD9E8D57;
    for (int round = 0; round < 10; round++) {
        const words p0 = c[0] * TIMES_0, p1 = c[2] * TIMES_1;
        c[0] = (p1 >> 32) ^ c[1] ^ uint64_t(k0);
        c[1] = p1 & MASK;
        c[2] = (p0 >> 32) ^ c[3] ^ uint64_t(k1);
        c[3] = p0 & MASK;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
}

// Integers below 2^52 as doubles: they are the last bits of 2^52 + n.
inline doubles number(const words& n) {
    return as<doubles>(n | uint64_t(0x4330000000000000)) - 0x1p52;
}

// log u = e log 2 + log m, with m in [sqrt(1/2), sqrt(2)); log m = 2 artanh((m - 1) / (m + 1)).
inline doubles logarithm(const doubles& u) {
    constexpr uint64_t ONE = 0x3FF0000000000000, ROOT_HALF = 0x3FE6A09E667F3BCD;
    constexpr uint64_t FRACTION = 0x000FFFFFFFFFFFFF;
    const words bits = as<words>(u) + (ONE - ROOT_HALF);
    const doubles e = number(bits >> 52) - 1023.0;
    const doubles m = as<doubles>((bits & FRACTION) + ROOT_HALF);
    const doubles s = (m - 1.0) / (m + 1.0), square = s * s;
    doubles rest = doubles{} + 1.0 / 23;
    for (int n = 21; n >= 3; n -= 2) rest = rest * square + 1.0 / n;
    // log 2 in two parts: e times the first, which ends in zeros, is exact.
    constexpr double HIGH = 0x1.62e42feep-1, LOW = 0x1.a39ef35793c76p-33;
    return e * HIGH + (2.0 * s + (2.0 * s * square * rest + e * LOW));
}

constexpr double factorial(int n) { return n < 2 ? 1.0 : n * factorial(n - 1); }

// An angle is k quarters of a turn and a rest r of at most pi/4, whose cosine and sine are series.
inline void turn(const doubles& angle, doubles& cosine, doubles& sine) {
    constexpr double ROUND = 0x1.8p52;  // adding it rounds to an integer, which the last bits hold
    constexpr double HIGH = 0x1.921fb544p+0, LOW = 0x1.0b4611a626331p-34;  // pi/2
    const doubles shifted = angle * 0x1.45f306dc9c883p-1 + ROUND;
    const words quarter = as<words>(shifted);
    const doubles k = shifted - ROUND;
    const doubles r = (angle - k * HIGH) - k * LOW, square = r * r;
    doubles c = {}, s = {};
    for (int j = 8; j >= 1; j--) {
        const double sign = j % 2 ? -1.0 : 1.0;
        c = c * square + sign / factorial(2 * j);
        s = s * square + sign / factorial(2 * j + 1);
    }
    c = c * square + 1.0;
    s = r + r * square * s;
    const auto crossed = (quarter & uint64_t(1)) != 0;
    const doubles x = crossed ? s : c, y = crossed ? c : s;
    cosine = ((quarter + uint64_t(1)) & uint64_t(2)) != 0 ? -x : x;
    sine = (quarter & uint64_t(2)) != 0 ? -y : y;
}

inline void two_normals(const words& first, const words& second, doubles& x, doubles& y) {
    const doubles u = (number(first) + 0.5) * 0x1p-32, v = (number(second) + 0.5) * 0x1p-32;
    doubles radius = -2.0 * logarithm(u), cosine, sine;
    for (int i = 0; i < LANES; i++) radius[i] = __builtin_sqrt(radius[i]);
    turn(v * 6.283185307179586, cosine, sine);
    x = radius * cosine;
    y = radius * sine;
}

// keys: (lanes, 2); out: (lanes, count)
template <typename T>
void normals(int64_t lanes, int64_t count, const int64_t* keys, T* out) {
    for (int64_t lane = 0; lane < lanes; lane++, keys += 2, out += count)
        for (int64_t at = 0; at < count; at += 4 * LANES) {
            words c[4] = {};
            doubles z[4];
            for (int i = 0; i < LANES; i++) c[0][i] = uint32_t(at / 4 + i);
            philox(uint32_t(keys[0]), uint32_t(keys[1]), c);
            two_normals(c[0], c[1], z[0], z[1]);
            two_normals(c[2], c[3], z[2], z[3]);
            T found[4 * LANES];
            for (int i = 0; i < LANES; i++)
                for (int j = 0; j < 4; j++) found[4 * i + j] = T(z[j][i]);
            memcpy(out + at, found, least(4 * LANES, count - at) * sizeof(T));
        }
}

// keys: (lanes, 2); out: (lanes, count), whether the word is at least ``low``.
void keep(int64_t lanes, int64_t count, int64_t number, uint64_t low, const int64_t* keys,
          uint8_t* out) {
    for (int64_t lane = 0; lane < lanes; lane++, keys += 2, out += count)
        for (int64_t at = 0; at < count; at += 4 * LANES) {
            words c[4] = {};
            uint8_t found[4 * LANES];
            for (int i = 0; i < LANES; i++) {
                c[0][i] = uint32_t(at / 4 + i);
                c[1][i] = uint32_t(number);
                c[3][i] = 2;
            }
            philox(uint32_t(keys[0]), uint32_t(keys[1]), c);
            for (int i = 0; i < LANES; i++)
                for (int j = 0; j < 4; j++) found[4 * i + j] = c[j][i] >= low;
            memcpy(out + at, found, least(4 * LANES, count - at));
        }
}

Shape shape_of(const int64_t* s) { return {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8]}; }

}  // namespace

#define FORMS(NAME, T)                                                                          \
    extern "C" void convolve_##NAME(const int64_t* s, const T* x, const T* w, const T* b,       \
                                    T* out, T* scratch) {                                       \
        convolve<T>(shape_of(s), x, w, b, out, scratch);                                        \
    }                                                                                           \
    extern "C" void kernel_gradient_##NAME(const int64_t* s, const T* x, const T* g, T* w,      \
                                           T* b, T* scratch) {                                  \
        kernel_gradient<T>(shape_of(s), x, g, w, b, scratch);                                   \
    }                                                                                           \
    extern "C" void pool_##NAME(const int64_t* s, const T* x, const T* g, T* out) {             \
        const bool two = s[4] == 2 && s[5] == 2;                                                \
        auto call = g ? (two ? pool<T, true, 2> : pool<T, true, 0>)                             \
                      : (two ? pool<T, false, 2> : pool<T, false, 0>);                          \
        call(s[0], s[1], s[2], s[3], s[4], s[5], x, g, out);                                    \
    }                                                                                           \
    extern "C" void normals_##NAME(const int64_t* s, const int64_t* keys, T* out) {             \
        normals<T>(s[0], s[1], keys, out);                                                      \
    }

extern "C" void keep_float(const int64_t* s, const int64_t* keys, uint8_t* out) {
    keep(s[0], s[1], s[2], uint64_t(s[3]), keys, out);
}

FORMS(float, float)
FORMS(double, double)
