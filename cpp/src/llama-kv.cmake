# the dynamic KV cache, included by CMakeLists.txt. apart from the files that are compiled in batches, which share names of helpers

set(LLAMA_KV_DYNAMIC_SOURCES
    llama-kv-dynamic-inplace.cpp
    llama-kv-dynamic.cpp
    llama-kv-growth.cpp
    llama-kv-inplace.cpp
    llama-kv-limits.cpp
    llama-kv-pages.cpp
    llama-kv-storage.cpp
    llama-kv-usage.cpp)

set_source_files_properties(${LLAMA_KV_DYNAMIC_SOURCES} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)

target_sources(llama PRIVATE ${LLAMA_KV_DYNAMIC_SOURCES})
