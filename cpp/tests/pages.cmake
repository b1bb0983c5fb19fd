# unit tests of device memory that comes and goes, included by CMakeLists.txt

# with a driver of its own. where the real one is built, its functions have the same names
if (NOT GGML_CUDA AND NOT GGML_HIP AND NOT GGML_MUSA)
    llama_build_and_test(test-kv-cuda.cpp LABEL "kvtool")
    target_include_directories(test-kv-cuda PRIVATE ${PROJECT_SOURCE_DIR}/ggml/src)
endif()

llama_build_and_test(test-kv-device.cpp LABEL "kvtool")
