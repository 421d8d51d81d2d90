// Vectors of the machine's own width, for the compiled loops of this folder.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

#ifdef __AVX512F__
constexpr int BYTES = 64;
#else
constexpr int BYTES = 32;
#endif

template <typename T>
constexpr int64_t WIDE = BYTES / sizeof(T);

template <typename T>
struct wide_of;
template <>
struct wide_of<float> {
    typedef float type __attribute__((vector_size(BYTES), aligned(4)));
    typedef int32_t whole __attribute__((vector_size(BYTES), aligned(4)));
};
template <>
struct wide_of<double> {
    typedef double type __attribute__((vector_size(BYTES), aligned(8)));
};
template <typename T>
using wide = typename wide_of<T>::type;

template <typename T>
inline wide<T> load(const T* at) {
    return *reinterpret_cast<const wide<T>*>(at);
}
template <typename T>
inline void store(T* at, const wide<T>& value) {
    *reinterpret_cast<wide<T>*>(at) = value;
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

}  // namespace
