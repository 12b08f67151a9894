# Languages, build type and compiler cache, with one clear message for each thing that may be missing.
include(CheckLanguage)

foreach(lang IN ITEMS C CXX)
    check_language(${lang})
    if(NOT CMAKE_${lang}_COMPILER)
        message(FATAL_ERROR "kvfold is compiled from source and no ${lang} compiler was found: install one (Debian, Ubuntu: `apt install g++`; Fedora: `dnf install gcc-c++`) or name it in CC and CXX.")
    endif()
    enable_language(${lang})
endforeach()

if(NOT "cxx_std_17" IN_LIST CMAKE_CXX_COMPILE_FEATURES)
    message(FATAL_ERROR "kvfold needs a C++17 compiler (GCC 9, Clang 10 or newer) and ${CMAKE_CXX_COMPILER} is ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}.")
endif()
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

if(GGML_CUDA)
    # The toolkit's usual place is often not on the PATH.
    find_program(KVFOLD_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_PATH ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
    if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX} AND KVFOLD_NVCC)
        set(CMAKE_CUDA_COMPILER "${KVFOLD_NVCC}" CACHE FILEPATH "CUDA compiler")
    endif()
    check_language(CUDA)
    if(NOT CMAKE_CUDA_COMPILER)
        message(FATAL_ERROR "GGML_CUDA=ON needs nvcc, the compiler of the CUDA toolkit (12.0 or newer), and it was not found or does not work: install the toolkit, or name nvcc with -DCMAKE_CUDA_COMPILER=, or leave GGML_CUDA out.")
    endif()
endif()

# Use ccache where it is installed, unless the user chose a launcher. Paths inside the checkout are made relative, so
# that another checkout finds what this one compiled.
find_program(KVFOLD_CCACHE ccache)
if(KVFOLD_CCACHE)
    set(kvfold_launcher "${KVFOLD_CCACHE}")
    if(NOT DEFINED ENV{CCACHE_BASEDIR})
        find_program(KVFOLD_ENV env)
        set(kvfold_launcher "${KVFOLD_ENV};CCACHE_BASEDIR=${CMAKE_SOURCE_DIR};${KVFOLD_CCACHE}")
    endif()
    foreach(lang IN ITEMS C CXX CUDA)
        if(NOT DEFINED CMAKE_${lang}_COMPILER_LAUNCHER AND NOT DEFINED ENV{CMAKE_${lang}_COMPILER_LAUNCHER})
            set(CMAKE_${lang}_COMPILER_LAUNCHER "${kvfold_launcher}")
        endif()
    endforeach()
endif()
