# unit tests of the dynamic KV cache, included by tools/kv-check: what is tested has no names outside of a shared library on Windows

if (NOT WIN32 OR NOT BUILD_SHARED_LIBS)
    foreach (name free growth pages storage)
        add_executable(test-kv-${name} ${CMAKE_CURRENT_LIST_DIR}/test-kv-${name}.cpp)
        target_link_libraries(test-kv-${name} PRIVATE llama)
        target_compile_features(test-kv-${name} PRIVATE cxx_std_17)

        add_test(NAME test-kv-${name} COMMAND test-kv-${name})
        set_property(TEST test-kv-${name} PROPERTY LABELS kvtool)
    endforeach()
endif()
