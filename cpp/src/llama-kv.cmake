# Sources of the dynamic KV cache. CMakeLists.txt includes this file. The sources are not compiled in batches (unity build),
# because some helpers in different files have the same name

set(LLAMA_KV_DYNAMIC_SOURCES
    llama-kv-cache-copies.cpp
    llama-kv-compute.cpp
    llama-kv-copies.cpp
    llama-kv-dynamic-cache.cpp
    llama-kv-dynamic.cpp
    llama-kv-fault.cpp
    llama-kv-graph.cpp
    llama-kv-growth.cpp
    llama-kv-layout.cpp
    llama-kv-limits.cpp
    llama-kv-lines.cpp
    llama-kv-lost-seqs.cpp
    llama-kv-pages-host.cpp
    llama-kv-pages.cpp
    llama-kv-planned-rows.cpp
    llama-kv-region.cpp
    llama-kv-row-request.cpp
    llama-kv-rows.cpp
    llama-kv-state-rows.cpp
    llama-kv-storage-copy.cpp
    llama-kv-storage-inplace.cpp
    llama-kv-usage.cpp)

# Layers that a tree can lack: changes of type and budgets, and the pages of devices
if (EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/llama-kv-retype.cpp)
    list(APPEND LLAMA_KV_DYNAMIC_SOURCES
        llama-kv-budget-member.cpp
        llama-kv-cell-types.cpp
        llama-kv-convert.cpp
        llama-kv-foreign-state.cpp
        llama-kv-retype.cpp)
endif()

if (EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/llama-kv-pages-device.cpp)
    list(APPEND LLAMA_KV_DYNAMIC_SOURCES llama-kv-pages-device.cpp)
else()
    list(APPEND LLAMA_KV_DYNAMIC_SOURCES llama-kv-no-device.cpp)
endif()

set_source_files_properties(${LLAMA_KV_DYNAMIC_SOURCES} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)

target_sources(llama PRIVATE ${LLAMA_KV_DYNAMIC_SOURCES})

file(GLOB LLAMA_KV_HEADERS ${PROJECT_SOURCE_DIR}/include/llama-kv*.h)
install(FILES ${LLAMA_KV_HEADERS} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
