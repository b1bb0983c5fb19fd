# unit tests of the dynamic KV cache, included by CMakeLists.txt

llama_build_and_test(test-kv-free.cpp    LABEL "kvtool")
llama_build_and_test(test-kv-growth.cpp  LABEL "kvtool")
llama_build_and_test(test-kv-pages.cpp   LABEL "kvtool")
llama_build_and_test(test-kv-storage.cpp LABEL "kvtool")
