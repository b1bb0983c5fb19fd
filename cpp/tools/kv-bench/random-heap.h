#pragma once

#include "api.h"

#include <random>
#include <vector>

// Draw the position of a context's memory at random: allocate blocks of random sizes before the context is created,
// free some, and keep the others while this object lives.
//
// The memory from the C library affects the speed of a context by chance, and a build gets the same memory in each
// process. So a change of one allocation would look like a change of speed. With a random position for each context,
// rounds are observations of both. (T. Mytkowicz et al.: Producing wrong data without doing anything obviously wrong,
// ASPLOS 2009; C. Curtsinger, E. Berger: Stabilizer, ASPLOS 2013, which also moves code and stack, but needs its own
// compiler.)
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
