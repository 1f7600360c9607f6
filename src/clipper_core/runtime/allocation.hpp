// Allocation without exceptions, for memory whose size a peer determines, so that the caller can
// return "no memory".
#pragma once

#include <cstddef>
#include <deque>
#include <new>
#include <vector>

namespace clipper {

template <class T> T* make() noexcept {  // nullptr: no memory
    try {
        return new T();
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

// False: there is no memory, and nothing has changed.
template <class T> bool try_push(std::deque<T>& items, const T& one) noexcept {
    try {
        items.push_back(one);
        return true;
    } catch (const std::bad_alloc&) {
        return false;
    }
}

// Reserve space for `n` items, so that push_back up to n items cannot fail. False: no memory, and
// nothing has changed.
template <class T> bool make_room(std::vector<T>& items, std::size_t n) noexcept {
    if (items.capacity() >= n) return true;
    try {
        items.reserve(items.capacity() * 2 > n ? items.capacity() * 2 : n);
        return true;
    } catch (const std::bad_alloc&) {
        return false;
    }
}

}  // namespace clipper
