// operator new of a program: the N-th large enough allocation fails, once or with all later ones

#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

static std::atomic<long> n_left = -1; // until one fails, -1: none fails

static size_t n_bytes_least = 0; // minimum size of these allocations
static size_t n_bytes_most  = SIZE_MAX;
static bool   is_for_good   = false;

static void * allocate(size_t n_bytes) {
    if (n_left < 0 || n_bytes < n_bytes_least || n_bytes > n_bytes_most || n_left-- > 0) {
        return malloc(n_bytes);
    }
    if (is_for_good) {
        n_left = 0;
    }
    return nullptr;
}

void * operator new(size_t n_bytes) {
    void * res = allocate(n_bytes);
    if (!res) {
        throw std::bad_alloc();
    }
    return res;
}

void * operator new(size_t n_bytes, const std::nothrow_t &) noexcept { return allocate(n_bytes); }

void operator delete(void * ptr) noexcept { free(ptr); }
void operator delete(void * ptr, size_t) noexcept { free(ptr); }
