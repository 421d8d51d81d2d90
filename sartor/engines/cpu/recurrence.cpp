// The loop of an LSTM layer for lanes on the cores of a CPU: all steps of some texts at a time, whose
// state stays in the first cache.
//
// Texts are shared by threads (without OpenMP there is one). The numbers of a text are the same to
// the bit whatever texts, lanes and threads it shares.

#include <cmath>
#include <vector>

#include "vectors.h"

namespace {

#ifdef __AVX512F__
constexpr int ROWS = 6, ACROSS = 4;
#else
constexpr int ROWS = 4, ACROSS = 3;
#endif
// Texts that are worked on at once; vectors of each that are in registers at once.

// exp of numbers up to 88 in size: 2^n times a polynomial for the rest (Cephes' coefficients).
inline wide<float> exponential(wide<float> x) {
    typedef wide<float> V;
    constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers
    const V low = V{} - 87.0f, high = V{} + 88.0f;
    V bounded = x > high ? high : x;
    bounded = bounded < low ? low : bounded;
    const V moved = bounded * 1.44269504088896341f + SHIFT;
    const V n = moved - SHIFT;
    const V r = bounded - n * 0.693359375f - n * -2.12194440e-4f;
    V p = V{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    typedef vector_of<float, WIDE<float>>::whole Whole;
    Whole bits;
    std::memcpy(&bits, &moved, sizeof bits);
    bits = (bits + 127) << 23;  // the low bits of `moved` are n
    V power;
    std::memcpy(&power, &bits, sizeof power);
    const V found = p * power;
    return x == x ? found : x;
}
inline wide<double> exponential(wide<double> x) {
    wide<double> found;
    for (int i = 0; i < WIDE<double>; i++) found[i] = std::exp(x[i]);
    return found;
}

template <typename T>
inline wide<T> sigmoid(wide<T> x) {
    return T(1) / (T(1) + exponential(-x));
}

// Near 0, where one minus one loses digits, by a polynomial (Cephes' coefficients).
inline wide<float> tanh_of(wide<float> x) {
    typedef wide<float> V;
    const V z = x * x;
    V p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    p = p * z * x + x;
    const V far = 1.0f - 2.0f / (exponential(x + x) + 1.0f);
    return z < V{} + 0.390625f ? p : far;
}
inline wide<double> tanh_of(wide<double> x) {
    wide<double> found;
    for (int i = 0; i < WIDE<double>; i++) found[i] = std::tanh(x[i]);
    return found;
}

struct Sizes {
    int64_t lanes, batch, steps, hidden;
    bool backward;
};

template <typename T>
int64_t filled(int64_t number) {
    return (number + WIDE<T> - 1) / WIDE<T> * WIDE<T>;
}

// sum (M, columns) += x (M, depth) times w (depth, columns), whose rows are filled up to whole
// vectors; M rows and N vectors at once.
template <typename T, int M, int N>
inline void multiply_of(int64_t depth, const T* x, int64_t x_row, const T* w, int64_t w_row, T* sum,
                        int64_t sum_row) {
    wide<T> part[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) part[m][n] = load(sum + m * sum_row + n * WIDE<T>);
    for (int64_t k = 0; k < depth; k++) {
        wide<T> value[N];
        for (int n = 0; n < N; n++) value[n] = load(w + k * w_row + n * WIDE<T>);
        for (int m = 0; m < M; m++) {
            const T scale = x[m * x_row + k];
            for (int n = 0; n < N; n++) part[m][n] += value[n] * scale;
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) store(sum + m * sum_row + n * WIDE<T>, part[m][n]);
}

template <typename T, int M>
void multiply(int64_t depth, int64_t columns, const T* x, int64_t x_row, const T* w, int64_t w_row,
              T* sum, int64_t sum_row) {
    in_shares<ACROSS>(columns / WIDE<T>, [&](auto vectors, int64_t n) {
        multiply_of<T, M, vectors>(depth, x, x_row, w + n * WIDE<T>, w_row, sum + n * WIDE<T>,
                                   sum_row);
    });
}

// Forwards, M texts, from a first output and memory. turned: (hidden, 4 hidden), rows filled up.
// work: 3 * M * space numbers.
template <typename T, int M>
void run_of(const Sizes& s, const T* given, const T* turned, const bool* is_token,
            const T* first_output, const T* first_cell, T* outputs, T* gates, T* cells, T* work) {
    const int64_t h = s.hidden, across = filled<T>(4 * h), space = across + WIDE<T>;
    T *gate = work, *state = gate + M * space, *cell = state + M * space;
    std::memset(state, 0, 2 * M * space * sizeof(T));
    for (int m = 0; m < M; m++) {
        std::memcpy(state + m * space, first_output + m * h, h * sizeof(T));
        std::memcpy(cell + m * space, first_cell + m * h, h * sizeof(T));
    }
    for (int64_t step = 0; step < s.steps; step++) {
        const int64_t t = s.backward ? s.steps - 1 - step : step;
        bool any = false;
        for (int m = 0; m < M; m++) {
            any = any || is_token[m * s.steps + t];
            std::memcpy(gate + m * space, given + (m * s.steps + t) * 4 * h, 4 * h * sizeof(T));
        }
        if (any) multiply<T, M>(h, across, state, space, turned, across, gate, space);
        for (int m = 0; m < M; m++) {
            const int64_t at = m * s.steps + t;
            T *g = gate + m * space, *c = cell + m * space, *o = state + m * space;
            T* kept = gates + at * 4 * h;
            if (!is_token[at]) {  // its gates are never read
                std::memcpy(outputs + at * h, o, h * sizeof(T));
                std::memcpy(cells + at * h, c, h * sizeof(T));
                continue;
            }
            // The last vector reaches beyond the state, into numbers that nobody reads.
            for (int64_t j = 0; j < h; j += WIDE<T>) {
                const wide<T> write = sigmoid<T>(load(g + j)), keep = sigmoid<T>(load(g + h + j));
                const wide<T> add = tanh_of(load(g + 2 * h + j));
                const wide<T> read = sigmoid<T>(load(g + 3 * h + j));
                const wide<T> next = keep * load(c + j) + write * add;
                const wide<T> output = read * tanh_of(next);
                const int64_t left = h - j;
                store(c + j, next);
                store(o + j, output);
                store_some(kept + j, write, left);
                store_some(kept + h + j, keep, left);
                store_some(kept + 2 * h + j, add, left);
                store_some(kept + 3 * h + j, read, left);
                store_some(outputs + at * h + j, output, left);
                store_some(cells + at * h + j, next, left);
            }
        }
    }
}

// Backwards, M texts; `last` is the gradient of the last memory. weight: (4 hidden, hidden), rows
// filled up.
template <typename T, int M>
void back_of(const Sizes& s, const T* grad, const T* last, const T* weight, const bool* is_token,
             const T* first_cell, const T* gates, const T* cells, T* out, T* to_output, T* to_cell,
             T* work) {
    const int64_t h = s.hidden, across = filled<T>(h), space = filled<T>(4 * h) + WIDE<T>;
    T *gate = work, *state = gate + M * space, *memory = state + M * space;
    std::memset(work, 0, 3 * M * space * sizeof(T));
    for (int m = 0; m < M; m++) std::memcpy(memory + m * space, last + m * h, h * sizeof(T));
    for (int64_t step = 0; step < s.steps; step++) {
        const int64_t t = s.backward ? step : s.steps - 1 - step;
        const int64_t earlier = s.backward ? 1 : -1;
        const bool begins = step == s.steps - 1;
        bool any = false;
        for (int m = 0; m < M; m++) {
            const int64_t at = m * s.steps + t;
            const bool there = is_token[at];
            T *g = gate + m * space, *o = state + m * space, *c = memory + m * space;
            T* to = out + at * 4 * h;
            if (!there) {
                for (int64_t j = 0; j < h; j++) o[j] += grad[at * h + j];
                std::memset(g, 0, 4 * h * sizeof(T));
                std::memset(to, 0, 4 * h * sizeof(T));
                continue;
            }
            any = true;
            const T *from = gates + at * 4 * h, *cell = cells + at * h;
            for (int64_t j = 0; j < h; j += WIDE<T>) {
                const int64_t left = h - j;
                const wide<T> write = load_some(from + j, left);
                const wide<T> keep = load_some(from + h + j, left);
                const wide<T> add = load_some(from + 2 * h + j, left);
                const wide<T> read = load_some(from + 3 * h + j, left);
                const wide<T> after = tanh_of(load_some(cell + j, left));
                const T* earlier_cell = begins ? first_cell + m * h : cell + earlier * h;
                const wide<T> before = load_some(earlier_cell + j, left);
                const wide<T> along = load(o + j) + load_some(grad + at * h + j, left);
                const wide<T> slope = load(c + j) + along * read * (T(1) - after * after);
                store_some(g + j, slope * add * write * (T(1) - write), left);
                store_some(g + h + j, slope * before * keep * (T(1) - keep), left);
                store_some(g + 2 * h + j, slope * write * (T(1) - add * add), left);
                store_some(g + 3 * h + j, along * after * read * (T(1) - read), left);
                store(c + j, slope * keep);
                store(o + j, wide<T>{});
            }
            std::memcpy(to, g, 4 * h * sizeof(T));
        }
        // The gradient of a text that ended later has no gates: it stays as it is.
        if (any) multiply<T, M>(4 * h, across, gate, space, weight, across, state, space);
    }
    for (int m = 0; m < M; m++) {
        std::memcpy(to_output + m * h, state + m * space, h * sizeof(T));
        std::memcpy(to_cell + m * h, memory + m * space, h * sizeof(T));
    }
}

// The texts of a lane in blocks of nearly equal size, ROWS at most: the first text of each.
struct Blocks {
    int64_t batch, number;
    explicit Blocks(int64_t batch) : batch(batch), number((batch + ROWS - 1) / ROWS) {}
    int64_t first(int64_t block) const { return block * batch / number; }
};

// A tensor whose lanes lie so far apart.
template <typename T>
struct Lanes {
    const T* data;
    int64_t apart;
    const T* at(int64_t lane, int64_t place) const { return data + lane * apart + place; }
};

template <typename T>
void run(const Sizes& s, int threads, Lanes<T> given, Lanes<T> weight, Lanes<bool> is_token,
         Lanes<T> first_output, Lanes<T> first_cell, T* outputs, T* gates, T* cells) {
    const int64_t h = s.hidden, across = filled<T>(4 * h);
    const Blocks blocks(s.batch);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<T> turned(h * across), work(3 * ROWS * (across + WIDE<T>));
        int64_t held = -1;
#pragma omp for schedule(static)
        for (int64_t k = 0; k < s.lanes * blocks.number; k++) {
            const int64_t lane = k / blocks.number, block = k % blocks.number;
            if (lane != held) {
                const T* from = weight.at(lane, 0);
                for (int64_t i = 0; i < h; i++)
                    for (int64_t j = 0; j < 4 * h; j++) turned[i * across + j] = from[j * h + i];
                held = lane;
            }
            const int64_t first = blocks.first(block), texts = blocks.first(block + 1) - first;
            const int64_t place = first * s.steps, whole = lane * s.batch * s.steps + place;
            with_constant<ROWS>(texts, [&](auto rows) {
                run_of<T, rows>(s, given.at(lane, place * 4 * h), turned.data(),
                                is_token.at(lane, place), first_output.at(lane, first * h),
                                first_cell.at(lane, first * h), outputs + whole * h,
                                gates + whole * 4 * h, cells + whole * h, work.data());
            });
        }
    }
}

template <typename T>
void back(const Sizes& s, int threads, Lanes<T> grad, Lanes<T> last, Lanes<T> weight,
          Lanes<bool> is_token, Lanes<T> first_cell, Lanes<T> gates, Lanes<T> cells, T* out,
          T* to_output, T* to_cell) {
    const int64_t h = s.hidden, across = filled<T>(h);
    const Blocks blocks(s.batch);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<T> rows(4 * h * across), work(3 * ROWS * (filled<T>(4 * h) + WIDE<T>));
        int64_t held = -1;
#pragma omp for schedule(static)
        for (int64_t k = 0; k < s.lanes * blocks.number; k++) {
            const int64_t lane = k / blocks.number, block = k % blocks.number;
            if (lane != held) {
                const T* from = weight.at(lane, 0);
                for (int64_t i = 0; i < 4 * h; i++)
                    std::memcpy(rows.data() + i * across, from + i * h, h * sizeof(T));
                held = lane;
            }
            const int64_t first = blocks.first(block), texts = blocks.first(block + 1) - first;
            const int64_t place = first * s.steps, text = lane * s.batch + first;
            with_constant<ROWS>(texts, [&](auto number) {
                back_of<T, number>(s, grad.at(lane, place * h), last.at(lane, first * h),
                                   rows.data(), is_token.at(lane, place),
                                   first_cell.at(lane, first * h), gates.at(lane, place * 4 * h),
                                   cells.at(lane, place * h), out + text * s.steps * 4 * h,
                                   to_output + text * h, to_cell + text * h, work.data());
            });
        }
    }
}

}  // namespace

#define FORMS(NAME, T)                                                                            \
    extern "C" void recurrence_##NAME(const int64_t* n, int threads, const T* given,              \
                                      const T* weight, const bool* is_token,                      \
                                      const T* first_output, const T* first_cell, T* outputs,     \
                                      T* gates, T* cells) {                                       \
        const Sizes s = {n[0], n[1], n[2], n[3], n[4] != 0};                                      \
        run<T>(s, threads, {given, n[5]}, {weight, n[6]}, {is_token, n[7]}, {first_output, n[8]}, \
               {first_cell, n[9]}, outputs, gates, cells);                                        \
    }                                                                                             \
    extern "C" void recurrence_gradient_##NAME(                                                   \
        const int64_t* n, int threads, const T* grad, const T* last, const T* weight,             \
        const bool* is_token, const T* first_cell, const T* gates, const T* cells, T* out,        \
        T* to_output, T* to_cell) {                                                               \
        const Sizes s = {n[0], n[1], n[2], n[3], n[4] != 0};                                      \
        back<T>(s, threads, {grad, n[5]}, {last, n[6]}, {weight, n[7]}, {is_token, n[8]},         \
                {first_cell, n[9]}, {gates, n[10]}, {cells, n[11]}, out, to_output, to_cell);     \
    }

FORMS(float, float)
FORMS(double, double)
