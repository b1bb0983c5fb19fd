#pragma once

#include "api.h"

#include <random>
#include <vector>

// Gives the memory of a context random addresses: allocates blocks of random sizes before the context is created, frees some of
// them, and keeps the others while this object exists.
//
// The addresses that the C library returns affect the speed of a context by chance. A build gets the same addresses in each
// process. So if a patch changes one allocation, this would look like a change of speed. With random addresses for each context,
// the average over the rounds does not depend on the addresses. (T. Mytkowicz et al.: Producing wrong data without doing
// anything obviously wrong, ASPLOS 2009; C. Curtsinger, E. Berger: Stabilizer, ASPLOS 2013, which also moves code and stack,
// but needs its own compiler.)
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
