#include <stddef.h>
#include <stdint.h>

/* The sum of n words. Four streams, so that one core asks for as much as it can. */
uint64_t sum(const uint64_t *words, size_t n) {
    uint64_t total = 0;
    size_t quarter = n / 4;
    for (size_t i = 0; i < quarter; i++)
        total += words[i] + words[quarter + i] + words[2 * quarter + i] + words[3 * quarter + i];
    return total;
}
