# unit tests of the dynamic KV cache, included by tools/kv-check

set(KV_TESTS_DIR ${CMAKE_CURRENT_LIST_DIR})

# a test of another layer can be missing
function(kv_test name)
    if (NOT EXISTS ${KV_TESTS_DIR}/test-kv-${name}.cpp)
        return()
    endif()

    add_executable(test-kv-${name} ${KV_TESTS_DIR}/test-kv-${name}.cpp)
    target_link_libraries(test-kv-${name} PRIVATE llama)
    target_compile_features(test-kv-${name} PRIVATE cxx_std_17)

    add_test(NAME test-kv-${name} COMMAND test-kv-${name})
    set_property(TEST test-kv-${name} PROPERTY LABELS kvtool)

    # what it is made of besides
    target_sources(test-kv-${name} PRIVATE ${ARGN})
endfunction()

# of kv-check
kv_test(reference ${KV_TESTS_DIR}/../tools/kv-check/reference.cpp ${KV_TESTS_DIR}/../tools/kv-check/values.cpp)

# of llama-server
kv_test(conversation-files ${KV_TESTS_DIR}/../tools/server/server-conversation-files.cpp)
if (TARGET test-kv-conversation-files)
    target_link_libraries(test-kv-conversation-files PRIVATE vendor::hash)
endif()

# every type of K and V on a CPU, and rotations: not every upstream has the patches for them
file(STRINGS ${PROJECT_SOURCE_DIR}/ggml/src/ggml-cpu/ops.cpp has_flash_attn_types REGEX ggml_cpu_get_to_float)
if (has_flash_attn_types)
    kv_test(flash-attn)
endif()

file(STRINGS ${PROJECT_SOURCE_DIR}/ggml/src/ggml-cpu/ops.cpp has_hadamard_vec REGEX ggml_fwht_vec)
if (has_hadamard_vec)
    kv_test(hadamard)
endif()

# on Windows, what is tested has no names outside of a shared library
if (NOT WIN32 OR NOT BUILD_SHARED_LIBS)
    kv_test(free)
    kv_test(growth)
    kv_test(no-memory)
    kv_test(pages)
    kv_test(storage)
    kv_test(types)

    # in place on a device
    kv_test(storage-device ${KV_TESTS_DIR}/../tools/kv-check/fake-device.cpp)

    # pages of a device: a tree without the layer of the device has no patch for them
    file(STRINGS ${PROJECT_SOURCE_DIR}/ggml/src/ggml-cuda/common.cuh has_pages REGEX GGML_CUDA_PAGES)
    if (has_pages)
        kv_test(device ${KV_TESTS_DIR}/../tools/kv-check/fake-device.cpp)

        # with a driver of its own. where the real one is built, its functions have the same names
        if (NOT GGML_CUDA AND NOT GGML_HIP AND NOT GGML_MUSA)
            kv_test(cuda)
            target_include_directories(test-kv-cuda PRIVATE ${PROJECT_SOURCE_DIR}/ggml/src)
        endif()
    endif()
endif()
