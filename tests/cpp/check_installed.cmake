# Installs the library, then configures, builds and runs tests/consumer against the installation.
#   cmake -DBUILD=DIR -DWORK=DIR -DMODEL=FILE.gguf -DFLAGS=-fsanitize=... -DLINK_FLAGS=... -P check_installed.cmake
# For another system, use -DTOOLCHAIN=FILE.cmake -DTARGET=... instead of flags and compilers.
function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/installed)
file(RENAME ${WORK}/installed ${WORK}/prefix)  # packages are relocatable
if(TOOLCHAIN)
  set(compiler -DCMAKE_TOOLCHAIN_FILE=${TOOLCHAIN} -DH2O_TARGET=${TARGET})
else()
  set(compiler -DCMAKE_C_COMPILER=${CC} -DCMAKE_CXX_COMPILER=${CXX}
    -DCMAKE_C_FLAGS=${FLAGS} -DCMAKE_CXX_FLAGS=${FLAGS} "-DCMAKE_EXE_LINKER_FLAGS=${LINK_FLAGS}")
endif()
run(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/../consumer -B ${WORK}/build -G ${GENERATOR}
  -DCMAKE_PREFIX_PATH=${WORK}/prefix -DH2O_MODEL=${MODEL} ${compiler})
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${CMAKE_CTEST_COMMAND} --test-dir ${WORK}/build --output-on-failure)
