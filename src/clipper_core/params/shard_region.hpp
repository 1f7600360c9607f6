// Memory that a worker on the same host shares with a shard, into which the shard writes the rows
// that the worker pulls.
//
// The worker makes a memory file, seals its size and sends its descriptor over the unix socket; the
// shard maps it to write, closes the descriptor, and unmaps it with the connection. It is the
// worker's memory and not the shard's, because then the reader decides, without a message, when a
// place may be used again, and a worker that writes to the memory harms no other worker. The other
// way round (a lane's rows, docs/design.md), a row can be used again only after the reader's
// answer. The cost: each connection has its own memory, which counts toward the shard's limit
// (`shared_bytes_max`).
//
// A shard must not die of what a worker sent. Memory that could shrink under a writer kills it
// (SIGBUS), so the size must be sealed; so does memory of huge pages when the host has none left,
// so only files of ordinary pages are accepted. Each offset is compared with the size of the
// mapping before a byte is written. Source: memfd_create(2), fcntl(2) "File Sealing".
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <linux/magic.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

namespace clipper {

enum RegionFault {
    REGION_MAPPED = 0,
    REGION_ABSENT = 1,
    REGION_UNSEALED = 2,
    REGION_TOO_LARGE = 3,
    REGION_UNMAPPED = 4
};

struct Region {
    std::uint8_t* memory = nullptr;
    std::uint64_t bytes = 0;
    int descriptor = -1;  // received and not mapped yet

    Region() = default;
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;
    ~Region() { drop(); }

    void take(int fd) {  // a descriptor was received: it replaces one that was not mapped
        if (descriptor >= 0) close(descriptor);
        descriptor = fd;
    }
    void unmap() {
        if (memory != nullptr) munmap(memory, bytes);
        memory = nullptr;
        bytes = 0;
    }
    void drop() {
        unmap();
        take(-1);
    }
    RegionFault map(std::uint64_t most) {  // map the received descriptor in place of the current
                                           // mapping; it is closed in any case
        int fd = descriptor;
        descriptor = -1;
        unmap();
        if (fd < 0) return REGION_ABSENT;
        RegionFault found = map_file(fd, most);
        close(fd);
        return found;
    }
    // nullptr: not completely inside, or not at the start of a cache line
    std::uint8_t* at(std::uint64_t offset, std::uint64_t n) const {
        if (offset % 64 || offset > bytes || n > bytes - offset) return nullptr;
        return memory == nullptr ? nullptr : memory + offset;
    }

private:
    RegionFault map_file(int fd, std::uint64_t most) {
        struct stat about;
        struct statfs system;
        int seals = fcntl(fd, F_GET_SEALS);
        if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW))
            return REGION_UNSEALED;
        if (fstatfs(fd, &system) != 0 || system.f_type != TMPFS_MAGIC || fstat(fd, &about) != 0)
            return REGION_UNSEALED;
        if (about.st_size <= 0) return REGION_UNMAPPED;
        if (std::uint64_t(about.st_size) > most) return REGION_TOO_LARGE;
        void* map =
            mmap(nullptr, std::size_t(about.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (map == MAP_FAILED) return REGION_UNMAPPED;
        memory = static_cast<std::uint8_t*>(map);
        bytes = std::uint64_t(about.st_size);
        return REGION_MAPPED;
    }
};

// A connection over TCP between two ends of one host needs no congestion control. BBR would spread
// an answer of two segments over 20 us.
inline void calm_loopback(int fd) {
    sockaddr_storage here{}, there{};
    socklen_t one = sizeof here, other = sizeof there;
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&here), &one) != 0) return;
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&there), &other) != 0 ||
        here.ss_family != there.ss_family)
        return;
    const auto* h4 = reinterpret_cast<const sockaddr_in*>(&here);
    const auto* t4 = reinterpret_cast<const sockaddr_in*>(&there);
    const auto* h6 = reinterpret_cast<const sockaddr_in6*>(&here);
    const auto* t6 = reinterpret_cast<const sockaddr_in6*>(&there);
    const bool v4 = here.ss_family == AF_INET && h4->sin_addr.s_addr == t4->sin_addr.s_addr;
    const bool v6 = here.ss_family == AF_INET6 &&
                    std::memcmp(&h6->sin6_addr, &t6->sin6_addr, sizeof h6->sin6_addr) == 0;
    if (v4 || v6) setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);  // every kernel has it
}

// As recv(), but also receives a descriptor (the last one, if there are several) and gives it to
// the region.
inline ssize_t receive_with(int fd, void* to, std::size_t n, Region& region) {
    iovec bytes{to, n};
    alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
    msghdr message{};
    message.msg_iov = &bytes;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    ssize_t got = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    if (got < 0) return got;
    for (cmsghdr* one = CMSG_FIRSTHDR(&message); one != nullptr; one = CMSG_NXTHDR(&message, one)) {
        if (one->cmsg_level != SOL_SOCKET || one->cmsg_type != SCM_RIGHTS) continue;
        std::size_t count = (one->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (std::size_t i = 0; i < count; i++) {
            int passed;
            std::memcpy(&passed, CMSG_DATA(one) + i * sizeof passed, sizeof passed);
            region.take(passed);
        }
    }
    return got;
}

}  // namespace clipper
