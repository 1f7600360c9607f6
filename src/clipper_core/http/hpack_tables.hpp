// The tables of HPACK (RFC 7541): the static fields (appendix A), the Huffman code (appendix B),
// and a machine that decodes it four bits at a time.
//
// A code has at least five bits, so that four bits complete at most one symbol. A state is an inner
// node of the tree of codes; a step from it by four bits gives the next node and perhaps a symbol.
// The machine has 256 nodes of 16 steps each, 16 KiB.
//
// Threads: any, after huffman_fill() has been called at import.
#pragma once

#include <cstdint>

namespace clipper {

struct StaticField {
    uint8_t name_bytes, value_bytes;
    const char* name;
    const char* value;
};

constexpr unsigned STATIC_FIELDS = 61;

// Index 1 of RFC 7541 is the first.
inline constexpr StaticField static_fields[STATIC_FIELDS] = {
    {10, 0, ":authority", ""},
    {7, 3, ":method", "GET"},
    {7, 4, ":method", "POST"},
    {5, 1, ":path", "/"},
    {5, 11, ":path", "/index.html"},
    {7, 4, ":scheme", "http"},
    {7, 5, ":scheme", "https"},
    {7, 3, ":status", "200"},
    {7, 3, ":status", "204"},
    {7, 3, ":status", "206"},
    {7, 3, ":status", "304"},
    {7, 3, ":status", "400"},
    {7, 3, ":status", "404"},
    {7, 3, ":status", "500"},
    {14, 0, "accept-charset", ""},
    {15, 13, "accept-encoding", "gzip, deflate"},
    {15, 0, "accept-language", ""},
    {13, 0, "accept-ranges", ""},
    {6, 0, "accept", ""},
    {27, 0, "access-control-allow-origin", ""},
    {3, 0, "age", ""},
    {5, 0, "allow", ""},
    {13, 0, "authorization", ""},
    {13, 0, "cache-control", ""},
    {19, 0, "content-disposition", ""},
    {16, 0, "content-encoding", ""},
    {16, 0, "content-language", ""},
    {14, 0, "content-length", ""},
    {16, 0, "content-location", ""},
    {13, 0, "content-range", ""},
    {12, 0, "content-type", ""},
    {6, 0, "cookie", ""},
    {4, 0, "date", ""},
    {4, 0, "etag", ""},
    {6, 0, "expect", ""},
    {7, 0, "expires", ""},
    {4, 0, "from", ""},
    {4, 0, "host", ""},
    {8, 0, "if-match", ""},
    {17, 0, "if-modified-since", ""},
    {13, 0, "if-none-match", ""},
    {8, 0, "if-range", ""},
    {19, 0, "if-unmodified-since", ""},
    {13, 0, "last-modified", ""},
    {4, 0, "link", ""},
    {8, 0, "location", ""},
    {12, 0, "max-forwards", ""},
    {18, 0, "proxy-authenticate", ""},
    {19, 0, "proxy-authorization", ""},
    {5, 0, "range", ""},
    {7, 0, "referer", ""},
    {7, 0, "refresh", ""},
    {11, 0, "retry-after", ""},
    {6, 0, "server", ""},
    {10, 0, "set-cookie", ""},
    {25, 0, "strict-transport-security", ""},
    {17, 0, "transfer-encoding", ""},
    {10, 0, "user-agent", ""},
    {4, 0, "vary", ""},
    {3, 0, "via", ""},
    {16, 0, "www-authenticate", ""},
};

struct HuffmanCode {
    uint32_t bits;  // right-aligned
    uint8_t length;
};

constexpr unsigned HUFFMAN_SYMBOLS = 257;  // the last is EOS
constexpr unsigned HUFFMAN_EOS = 256;

inline constexpr HuffmanCode huffman_codes[HUFFMAN_SYMBOLS] = {
    {0x1ff8, 13}, {0x7fffd8, 23}, {0xfffffe2, 28}, {0xfffffe3, 28}, {0xfffffe4, 28},
    {0xfffffe5, 28}, {0xfffffe6, 28}, {0xfffffe7, 28}, {0xfffffe8, 28}, {0xffffea, 24},
    {0x3ffffffc, 30}, {0xfffffe9, 28}, {0xfffffea, 28}, {0x3ffffffd, 30}, {0xfffffeb, 28},
    {0xfffffec, 28}, {0xfffffed, 28}, {0xfffffee, 28}, {0xfffffef, 28}, {0xffffff0, 28},
    {0xffffff1, 28}, {0xffffff2, 28}, {0x3ffffffe, 30}, {0xffffff3, 28}, {0xffffff4, 28},
    {0xffffff5, 28}, {0xffffff6, 28}, {0xffffff7, 28}, {0xffffff8, 28}, {0xffffff9, 28},
    {0xffffffa, 28}, {0xffffffb, 28}, {0x14, 6}, {0x3f8, 10}, {0x3f9, 10}, {0xffa, 12},
    {0x1ff9, 13}, {0x15, 6}, {0xf8, 8}, {0x7fa, 11}, {0x3fa, 10}, {0x3fb, 10}, {0xf9, 8},
    {0x7fb, 11}, {0xfa, 8}, {0x16, 6}, {0x17, 6}, {0x18, 6}, {0x0, 5}, {0x1, 5}, {0x2, 5},
    {0x19, 6}, {0x1a, 6}, {0x1b, 6}, {0x1c, 6}, {0x1d, 6}, {0x1e, 6}, {0x1f, 6}, {0x5c, 7},
    {0xfb, 8}, {0x7ffc, 15}, {0x20, 6}, {0xffb, 12}, {0x3fc, 10}, {0x1ffa, 13}, {0x21, 6},
    {0x5d, 7}, {0x5e, 7}, {0x5f, 7}, {0x60, 7}, {0x61, 7}, {0x62, 7}, {0x63, 7}, {0x64, 7},
    {0x65, 7}, {0x66, 7}, {0x67, 7}, {0x68, 7}, {0x69, 7}, {0x6a, 7}, {0x6b, 7}, {0x6c, 7},
    {0x6d, 7}, {0x6e, 7}, {0x6f, 7}, {0x70, 7}, {0x71, 7}, {0x72, 7}, {0xfc, 8}, {0x73, 7},
    {0xfd, 8}, {0x1ffb, 13}, {0x7fff0, 19}, {0x1ffc, 13}, {0x3ffc, 14}, {0x22, 6}, {0x7ffd, 15},
    {0x3, 5}, {0x23, 6}, {0x4, 5}, {0x24, 6}, {0x5, 5}, {0x25, 6}, {0x26, 6}, {0x27, 6}, {0x6, 5},
    {0x74, 7}, {0x75, 7}, {0x28, 6}, {0x29, 6}, {0x2a, 6}, {0x7, 5}, {0x2b, 6}, {0x76, 7},
    {0x2c, 6}, {0x8, 5}, {0x9, 5}, {0x2d, 6}, {0x77, 7}, {0x78, 7}, {0x79, 7}, {0x7a, 7}, {0x7b, 7},
    {0x7ffe, 15}, {0x7fc, 11}, {0x3ffd, 14}, {0x1ffd, 13}, {0xffffffc, 28}, {0xfffe6, 20},
    {0x3fffd2, 22}, {0xfffe7, 20}, {0xfffe8, 20}, {0x3fffd3, 22}, {0x3fffd4, 22}, {0x3fffd5, 22},
    {0x7fffd9, 23}, {0x3fffd6, 22}, {0x7fffda, 23}, {0x7fffdb, 23}, {0x7fffdc, 23}, {0x7fffdd, 23},
    {0x7fffde, 23}, {0xffffeb, 24}, {0x7fffdf, 23}, {0xffffec, 24}, {0xffffed, 24}, {0x3fffd7, 22},
    {0x7fffe0, 23}, {0xffffee, 24}, {0x7fffe1, 23}, {0x7fffe2, 23}, {0x7fffe3, 23}, {0x7fffe4, 23},
    {0x1fffdc, 21}, {0x3fffd8, 22}, {0x7fffe5, 23}, {0x3fffd9, 22}, {0x7fffe6, 23}, {0x7fffe7, 23},
    {0xffffef, 24}, {0x3fffda, 22}, {0x1fffdd, 21}, {0xfffe9, 20}, {0x3fffdb, 22}, {0x3fffdc, 22},
    {0x7fffe8, 23}, {0x7fffe9, 23}, {0x1fffde, 21}, {0x7fffea, 23}, {0x3fffdd, 22}, {0x3fffde, 22},
    {0xfffff0, 24}, {0x1fffdf, 21}, {0x3fffdf, 22}, {0x7fffeb, 23}, {0x7fffec, 23}, {0x1fffe0, 21},
    {0x1fffe1, 21}, {0x3fffe0, 22}, {0x1fffe2, 21}, {0x7fffed, 23}, {0x3fffe1, 22}, {0x7fffee, 23},
    {0x7fffef, 23}, {0xfffea, 20}, {0x3fffe2, 22}, {0x3fffe3, 22}, {0x3fffe4, 22}, {0x7ffff0, 23},
    {0x3fffe5, 22}, {0x3fffe6, 22}, {0x7ffff1, 23}, {0x3ffffe0, 26}, {0x3ffffe1, 26}, {0xfffeb, 20},
    {0x7fff1, 19}, {0x3fffe7, 22}, {0x7ffff2, 23}, {0x3fffe8, 22}, {0x1ffffec, 25}, {0x3ffffe2, 26},
    {0x3ffffe3, 26}, {0x3ffffe4, 26}, {0x7ffffde, 27}, {0x7ffffdf, 27}, {0x3ffffe5, 26},
    {0xfffff1, 24}, {0x1ffffed, 25}, {0x7fff2, 19}, {0x1fffe3, 21}, {0x3ffffe6, 26},
    {0x7ffffe0, 27}, {0x7ffffe1, 27}, {0x3ffffe7, 26}, {0x7ffffe2, 27}, {0xfffff2, 24},
    {0x1fffe4, 21}, {0x1fffe5, 21}, {0x3ffffe8, 26}, {0x3ffffe9, 26}, {0xffffffd, 28},
    {0x7ffffe3, 27}, {0x7ffffe4, 27}, {0x7ffffe5, 27}, {0xfffec, 20}, {0xfffff3, 24}, {0xfffed, 20},
    {0x1fffe6, 21}, {0x3fffe9, 22}, {0x1fffe7, 21}, {0x1fffe8, 21}, {0x7ffff3, 23}, {0x3fffea, 22},
    {0x3fffeb, 22}, {0x1ffffee, 25}, {0x1ffffef, 25}, {0xfffff4, 24}, {0xfffff5, 24},
    {0x3ffffea, 26}, {0x7ffff4, 23}, {0x3ffffeb, 26}, {0x7ffffe6, 27}, {0x3ffffec, 26},
    {0x3ffffed, 26}, {0x7ffffe7, 27}, {0x7ffffe8, 27}, {0x7ffffe9, 27}, {0x7ffffea, 27},
    {0x7ffffeb, 27}, {0xffffffe, 28}, {0x7ffffec, 27}, {0x7ffffed, 27}, {0x7ffffee, 27},
    {0x7ffffef, 27}, {0x7fffff0, 27}, {0x3ffffee, 26}, {0x3fffffff, 30},
};

struct HuffmanStep {
    uint8_t next;  // node
    uint8_t symbol;
    uint8_t flags;
};

constexpr uint8_t HUFFMAN_EMITS = 1;    // `symbol` is complete
constexpr uint8_t HUFFMAN_FAILS = 2;    // EOS is in the string, which is an error
constexpr unsigned HUFFMAN_NODES = 256;  // inner nodes of a full tree with 257 leaves

inline HuffmanStep huffman_steps[HUFFMAN_NODES][16];
inline bool huffman_ends[HUFFMAN_NODES];  // the string may end here: fewer than 8 bits, all ones

// Fill the steps from the codes.
inline void huffman_fill() {
    // children of the inner nodes: > 0 another node, < 0 the leaf of symbol -1 - child, 0 none yet
    static int children[HUFFMAN_NODES][2];
    int nodes = 1;
    for (auto& pair : children) {
        pair[0] = pair[1] = 0;
    }
    for (unsigned symbol = 0; symbol < HUFFMAN_SYMBOLS; symbol++) {
        const HuffmanCode code = huffman_codes[symbol];
        int node = 0;
        for (int bit = code.length - 1; bit >= 0; bit--) {
            int& child = children[node][code.bits >> bit & 1];
            if (bit == 0) {
                child = -1 - int(symbol);
            } else {
                if (child == 0) {
                    child = nodes++;
                }
                node = child;
            }
        }
    }
    for (int node = 0; node < nodes; node++) {
        for (unsigned bits = 0; bits < 16; bits++) {
            HuffmanStep step = {0, 0, 0};
            int at = node;
            for (int bit = 3; bit >= 0; bit--) {
                const int child = children[at][bits >> bit & 1];
                if (child >= 0) {
                    at = child;
                } else if (-1 - child == int(HUFFMAN_EOS)) {
                    step.flags |= HUFFMAN_FAILS;
                    at = 0;
                } else {
                    step.symbol = uint8_t(-1 - child);
                    step.flags |= HUFFMAN_EMITS;
                    at = 0;
                }
            }
            step.next = uint8_t(at);
            huffman_steps[node][bits] = step;
        }
        huffman_ends[node] = false;
    }
    int node = 0;
    for (int ones = 0; ones < 8; ones++) {  // padding: the beginning of EOS
        huffman_ends[node] = true;
        node = children[node][1];
    }
}

}  // namespace clipper
