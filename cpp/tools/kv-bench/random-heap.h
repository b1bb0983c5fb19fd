#pragma once

#include "api.h"

#include <random>
#include <vector>

// Where the memory of a context begins, drawn at random: blocks of random sizes are taken before the context is made, some of
// them are given back, and the others stay as long as this lives.
//
// What a context gets from its C library decides by chance how fast it is, and a build gets the same in each process: a change of
// one allocation would look like a change of speed. With a place drawn for each context, rounds are observations of both.
// (T. Mytkowicz et al.: Producing wrong data without doing anything obviously wrong, ASPLOS 2009; C. Curtsinger, E. Berger:
// Stabilizer, ASPLOS 2013, which also moves code and stack, and takes a compiler of its own.)
class random_heap {
  public:
    random_heap(const llama_api & api, std::mt19937 & rng);
    ~random_heap();

    random_heap(const random_heap &) = delete;
    random_heap & operator=(const random_heap &) = delete;

  private:
    const llama_api & api;

    std::vector<void *> blocks;
};
