// Bytes: a buffer that grows at the end and is consumed from the front. Post: a message queue
// between threads. Lookup: a hash table from numbers to pointers.
//
// Nothing here throws when memory runs out. Bytes that could not be put are missing, and `lost` is
// set (or the function returns false); the owner then answers 503 or closes the connection.
#pragma once

#include <cstring>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>
#include "runtime/allocation.hpp"
#include "runtime/machine.hpp"

namespace clipper {

struct Bytes {
    std::uint8_t* data = nullptr;
    std::uint64_t begin = 0, end = 0, room = 0;
    bool lost = false;

    Bytes() = default;
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;
    ~Bytes() { std::free(data); }

    std::uint64_t size() const { return end - begin; }
    const std::uint8_t* at() const { return data + begin; }
    [[gnu::noinline]] std::uint8_t* reserve(std::uint64_t n) {  // space for n more bytes; nullptr: no memory
        if (room - end >= n) return data + end;
        if (begin) {
            std::memmove(data, data + begin, end - begin);
            end -= begin;
            begin = 0;
            if (room - end >= n) return data + end;
        }
        std::uint64_t more = room * 2 > end + n ? room * 2 : end + n;
        if (more < 256) more = 256;
        void* grown = std::realloc(data, more);
        if (grown == nullptr) {
            lost = true;
            return nullptr;
        }
        data = static_cast<std::uint8_t*>(grown);
        room = more;
        return data + end;
    }
    // Inlined, as put_text is, so that a copy of known length is a few instructions.
    [[gnu::always_inline]] void put(const void* from, std::uint64_t n) {
        if (n == 0) return;
        if (room - end < n && reserve(n) == nullptr) return;
        std::memcpy(data + end, from, n);
        end += n;
    }
    void put_byte(std::uint8_t byte) { put(&byte, 1); }
    [[gnu::always_inline]] void put_text(const char* text) { put(text, std::strlen(text)); }
    void put_decimal(std::uint64_t n) {
        char digits[20];
        int i = 20;
        do digits[--i] = char('0' + n % 10); while (n /= 10);
        put(digits + i, std::uint64_t(20 - i));
    }
    void put_hex(std::uint64_t n) {
        char digits[16];
        int i = 16;
        do digits[--i] = "0123456789abcdef"[n & 15]; while (n >>= 4);
        put(digits + i, std::uint64_t(16 - i));
    }
    void drop(std::uint64_t n) {  // from the front
        begin += n;
        if (begin == end) begin = end = 0;
    }
    void clear() {
        begin = end = 0;
        lost = false;
    }
    void take(Bytes& other) {  // replace the content by that of `other`, which is empty afterwards
        std::free(data);
        data = other.data, begin = other.begin, end = other.end, room = other.room,
        lost = other.lost;
        other.data = nullptr;
        other.begin = other.end = other.room = 0;
    }
    void shrink(std::uint64_t most) {  // release memory above `most` bytes after a large message
        if (room <= most || begin != end) return;
        std::free(data);
        data = nullptr;
        begin = end = room = 0;
    }
};

// A queue of messages from any thread to one, which sleeps on a descriptor. The descriptor is
// written when a message is put into an empty queue.
struct Post {
    std::mutex guard;
    std::vector<void*> waiting;
    int fd = -1;
    bool closed = false;

    bool put(void* item) {  // false: the queue is closed, or there is no memory
        bool first;
        {
            std::lock_guard<std::mutex> lock(guard);
            if (closed || !make_room(waiting, waiting.size() + 1)) return false;
            first = waiting.empty();
            waiting.push_back(item);
        }
        if (first) eventfd_signal(fd);
        return true;
    }
    void take_all(std::vector<void*>& into) {
        eventfd_drain(fd);
        std::lock_guard<std::mutex> lock(guard);
        into.swap(waiting);
    }
    bool append_to(std::vector<void*>& into) {  // false: there is no memory, and the messages stay
                                                // in the queue
        std::lock_guard<std::mutex> lock(guard);
        if (!make_room(into, into.size() + waiting.size())) return false;
        eventfd_drain(fd);
        into.insert(into.end(), waiting.begin(), waiting.end());
        waiting.clear();
        return true;
    }
    void close() {  // messages in the queue can still be taken
        std::lock_guard<std::mutex> lock(guard);
        closed = true;
    }
};

struct Lookup {
    std::unordered_map<std::uint64_t, void*> found;
    std::vector<std::uint64_t> listed;  // reserved for all keys

    bool put(std::uint64_t key, void* item) {  // false: no memory, and nothing has changed
        if (!make_room(listed, found.size() + 1)) return false;
        try {
            found[key] = item;
            return true;
        } catch (const std::bad_alloc&) {
            return false;
        }
    }
    void* take(std::uint64_t key) {  // nullptr: there is no such key
        auto at = found.find(key);
        if (at == found.end()) return nullptr;
        void* item = at->second;
        found.erase(at);
        return item;
    }
    std::uint64_t size() const { return found.size(); }
    const std::vector<std::uint64_t>* all() {  // the keys; until the next call
        listed.clear();
        for (auto& one : found) listed.push_back(one.first);
        return &listed;
    }
    void* get(std::uint64_t key) const {
        auto at = found.find(key);
        return at == found.end() ? nullptr : at->second;
    }
};

}  // namespace clipper
