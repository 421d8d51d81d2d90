// Vectors of the machine's own width, for the compiled loops of this folder.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

#ifdef __AVX512F__
constexpr int BYTES = 64;
#else
constexpr int BYTES = 32;
#endif

template <typename T>
constexpr int64_t WIDE = BYTES / sizeof(T);

// N numbers; they need not be aligned in memory.
template <typename T, int N>
struct vector_of;
template <int N>
struct vector_of<float, N> {
    typedef float type __attribute__((vector_size(N * sizeof(float)), aligned(4)));
    typedef int32_t whole __attribute__((vector_size(N * sizeof(float)), aligned(4)));
};
template <int N>
struct vector_of<double, N> {
    typedef double type __attribute__((vector_size(N * sizeof(double)), aligned(8)));
};
template <typename T>
using wide = typename vector_of<T, WIDE<T>>::type;

template <int N, typename T>
inline typename vector_of<T, N>::type load(const T* at) {
    return *reinterpret_cast<const typename vector_of<T, N>::type*>(at);
}
template <typename T>
inline wide<T> load(const T* at) {
    return load<WIDE<T>>(at);
}
template <typename T, typename V>
inline void store(T* at, V value) {  // of any alignment: V has lost what was said of it
    std::memcpy(at, &value, sizeof value);
}

// The first numbers of a vector, from or to memory that may end there.
template <typename T>
inline wide<T> load_some(const T* at, int64_t count) {
    if (count >= WIDE<T>) return load(at);
    wide<T> value = {};
    std::memcpy(&value, at, count * sizeof(T));
    return value;
}
template <typename T>
inline void store_some(T* at, const wide<T>& value, int64_t count) {
    if (count >= WIDE<T>)
        store(at, value);
    else
        std::memcpy(at, &value, count * sizeof(T));
}

// Calls work(N) with a number that is known when this is compiled: N = number, at most MOST.
template <int MOST, typename Work>
inline void with_constant(int64_t number, const Work& work) {
    if constexpr (MOST > 1)
        if (number < MOST) return with_constant<MOST - 1>(number, work);
    work(std::integral_constant<int, MOST>());
}

// Parts `number` into shares of nearly equal size, at most MOST, as a narrow rest would leave most
// of a core idle; calls work(N, first) for each.
template <int MOST, typename Work>
inline void in_shares(int64_t number, const Work& work) {
    const int64_t parts = (number + MOST - 1) / MOST;
    for (int64_t part = 0, first = 0; part < parts; part++) {
        const int64_t take = (number - first + parts - part - 1) / (parts - part);
        with_constant<MOST>(take, [&](auto count) { work(count, first); });
        first += take;
    }
}

}  // namespace
