# Unit tests of the dynamic KV cache. tools/kv-check includes this file

set(KV_TESTS_DIR ${CMAKE_CURRENT_LIST_DIR})

# add a test, unless its source does not exist: it can belong to a layer that the tree lacks
function(kv_test name)
    if (NOT EXISTS ${KV_TESTS_DIR}/test-kv-${name}.cpp)
        return()
    endif()

    add_executable(test-kv-${name} ${KV_TESTS_DIR}/test-kv-${name}.cpp)
    target_link_libraries(test-kv-${name} PRIVATE llama)
    target_compile_features(test-kv-${name} PRIVATE cxx_std_17)

    add_test(NAME test-kv-${name} COMMAND test-kv-${name})
    set_property(TEST test-kv-${name} PROPERTY LABELS kvtool)

    # sources of the tested code
    target_sources(test-kv-${name} PRIVATE ${ARGN})
endfunction()

# tests of kv-check
kv_test(reference ${KV_TESTS_DIR}/../tools/kv-check/reference.cpp ${KV_TESTS_DIR}/../tools/kv-check/values.cpp)

# tests of llama-server
kv_test(conversation-files ${KV_TESTS_DIR}/../tools/server/server-conversation-files.cpp)
if (TARGET test-kv-conversation-files)
    target_link_libraries(test-kv-conversation-files PRIVATE vendor::hash)
endif()

# tests of attention with every type of K and V on a CPU, of the rotation, and of the conversion of rows. They need patches that a tree can lack
file(STRINGS ${PROJECT_SOURCE_DIR}/ggml/src/ggml-cpu/ops.cpp has_flash_attn_types REGEX ggml_cpu_get_to_float)
if (has_flash_attn_types)
    kv_test(flash-attn)
endif()

file(STRINGS ${PROJECT_SOURCE_DIR}/ggml/src/ggml-cpu/ops.cpp has_hadamard_vec REGEX ggml_fwht_vec)
if (has_hadamard_vec)
    kv_test(hadamard)
endif()

file(STRINGS ${PROJECT_SOURCE_DIR}/ggml/src/ggml-cpu/ops.cpp has_convert_rows REGEX ggml_compute_forward_cpy_set_rows_fused)
if (has_convert_rows)
    kv_test(convert-rows)
endif()

# on Windows, functions of a shared library cannot be called from a test, because they are not exported
if (NOT WIN32 OR NOT BUILD_SHARED_LIBS)
    kv_test(free)
    kv_test(growth)
    kv_test(no-memory)
    kv_test(pages)
    kv_test(storage)
    kv_test(types)

    # test of storage in place on a fake device
    kv_test(storage-device ${KV_TESTS_DIR}/../tools/kv-check/fake-device.cpp)

    # test of pages of devices. A tree without the layer `device` lacks the patch for them
    file(STRINGS ${PROJECT_SOURCE_DIR}/ggml/src/ggml-cuda/common.cuh has_pages REGEX GGML_CUDA_PAGES)
    if (has_pages)
        kv_test(device ${KV_TESTS_DIR}/../tools/kv-check/fake-device.cpp)

        # test of CUDA's pages with a fake driver. Its functions have the same names as those of the real driver, so it is not
        # built with the real one
        if (NOT GGML_CUDA AND NOT GGML_HIP AND NOT GGML_MUSA)
            kv_test(cuda)
            target_include_directories(test-kv-cuda PRIVATE ${PROJECT_SOURCE_DIR}/ggml/src)
        endif()
    endif()
endif()
