# Compiles the layer h2o_cuda for the host: the same sources, except for kernel launches and PTX
# instructions, whose headers in this directory take precedence.
set(emulation ${PROJECT_SOURCE_DIR}/tests/cuda_emulation)
set_target_properties(h2o_cuda PROPERTIES H2O_EMULATED ON)
target_sources(h2o_cuda PRIVATE ${emulation}/block.cpp ${emulation}/overlap.cpp
  ${emulation}/runtime.cpp ${emulation}/watch.cpp)
target_include_directories(h2o_cuda BEFORE PRIVATE ${emulation})
target_include_directories(h2o_cuda SYSTEM PRIVATE ${H2O_CUDA_HEADERS})
target_link_libraries(h2o_cuda PRIVATE ${CMAKE_DL_LIBS})
add_library(emulated_cublas SHARED EXCLUDE_FROM_ALL ${emulation}/cublas.cpp)
set_target_properties(emulated_cublas PROPERTIES OUTPUT_NAME cublas SOVERSION 13)
target_include_directories(emulated_cublas SYSTEM PRIVATE ${H2O_CUDA_HEADERS})
get_target_property(sources h2o_cuda SOURCES)
list(FILTER sources INCLUDE REGEX "\\.cu$")
# With -O3 they take half as long again to compile.
set_source_files_properties(${sources} PROPERTIES LANGUAGE CXX
  COMPILE_OPTIONS "-x;c++;-include;emulation.h;-Wno-unknown-pragmas;-fno-strict-aliasing;$<$<CONFIG:Release>:-O2>")
