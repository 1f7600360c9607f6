// Decimal numbers to doubles: digits read eight at a time, and a product of 128 bits that rounds
// correctly.
//
// Sources: D. Lemire, "Number Parsing at a Gigabyte per Second", Software: Practice and Experience
// 2021, sections 5 and 6 (digits, and the product, after M. Eisel); N. Mushtak and D. Lemire, "Fast
// Number Parsing Without Fallback", 2023 (no product of numbers of 64 bits needs a third word).
//
// Threads: any, after powers_of_five has been filled at import.
#pragma once

#include <cstdint>
#include <cstring>

namespace clipper {

constexpr int64_t POWER_MIN = -65, POWER_MAX = 65;  // of ten; beyond, callers use from_chars

struct PowerOfFive {
    uint64_t high, low;  // 128 bits of 5**q, the highest bit set; rounded up for q < 0
};

inline PowerOfFive powers_of_five[POWER_MAX - POWER_MIN + 1];

// Append the decimal digits at p to the mantissa, modulo 2**64, and return their number, at most 8.
// Eight bytes must be readable.
inline unsigned append_digits(const unsigned char* p, uint64_t* mantissa) {
    static constexpr uint64_t tens[9] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000,
                                         100000000};
    uint64_t text;
    std::memcpy(&text, p, 8);
    const uint64_t others =
        ((text + 0x4646464646464646) | (text - 0x3030303030303030)) & 0x8080808080808080;
    const unsigned n = others ? unsigned(__builtin_ctzll(others)) >> 3 : 8;
    if (n == 0) {
        return 0;
    }
    text = (text - 0x3030303030303030) << (64 - 8 * n);  // the missing ones are leading zeros
    text = text * 10 + (text >> 8);
    constexpr uint64_t pairs = 0x000000FF000000FF;
    text = ((text & pairs) * 0x000F424000000064 + ((text >> 16) & pairs) * 0x0000271000000001) >> 32;
    *mantissa = *mantissa * tens[n] + text;
    return n;
}

// The double nearest to mantissa * 10**power, ties to even. False if the power is not in the table,
// or the result is not a normal number: then the value is not written.
inline bool scale(uint64_t mantissa, int64_t power, double* value) {
    if (power < POWER_MIN || power > POWER_MAX || mantissa == 0) {
        return false;
    }
    const PowerOfFive five = powers_of_five[power - POWER_MIN];
    const int zeros = __builtin_clzll(mantissa);
    mantissa <<= zeros;
    unsigned __int128 product = (unsigned __int128) mantissa * five.high;
    uint64_t upper = uint64_t(product >> 64), lower = uint64_t(product);
    if ((upper & 0x1FF) == 0x1FF) {  // the bits that are dropped may carry
        const uint64_t more = uint64_t(((unsigned __int128) mantissa * five.low) >> 64);
        lower += more;
        upper += lower < more;
    }
    const int top = int(upper >> 63), dropped = top + 64 - 52 - 3;
    uint64_t bits = upper >> dropped;
    int64_t exponent = ((217706 * power) >> 16) + 63 + top - zeros + 1023;
    if (exponent <= 0) {
        return false;
    }
    if (lower <= 1 && power >= -4 && power <= 23 && (bits & 3) == 1 && bits << dropped == upper) {
        bits &= ~uint64_t(1);  // half way between two doubles: to the even one
    }
    bits = (bits + (bits & 1)) >> 1;
    if (bits >= uint64_t(2) << 52) {
        bits = uint64_t(1) << 52;
        ++exponent;
    }
    if (exponent >= 0x7FF) {
        return false;
    }
    bits = (bits & ~(uint64_t(1) << 52)) | uint64_t(exponent) << 52;
    std::memcpy(value, &bits, 8);
    return true;
}

}  // namespace clipper
