#!/usr/bin/env bash
# Install the system packages that a CI job needs. Without root, only print which ones are missing.
#   ci/system.sh [vulkan|gcc-14|page|cross|hip|...]
# Each argument names the packages for one purpose. Arguments that are not in the list below install nothing. ccache and tmux are
# always installed.
set -euo pipefail
case "$(uname -s)" in
Linux)
    packages=(ccache tmux)
    for need; do
        case $need in
        vulkan | vulkan-full) packages+=(glslc libvulkan-dev spirv-headers mesa-vulkan-drivers) ;;
        gcc-14) packages+=(gcc-14 g++-14) ;;
        page) command -v google-chrome >/dev/null || packages+=(chromium) ;;
        cross) packages+=(wine64 wine qemu-user) ;;
        hip) packages+=(clang libamdhip64-dev libhipblas-dev) ;;
        esac
    done
    missing=()
    for package in "${packages[@]}"; do
        [ "$(dpkg-query -Wf '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || exit 0
    root=()
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || { echo "NOT INSTALLED: ${missing[*]} (no root here)" >&2; exit 7; }
        root=(sudo)
    fi
    "${root[@]}" apt-get update -qq
    "${root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" ;;
Darwin)
    for tool in ccache tmux; do command -v "$tool" >/dev/null || brew install --quiet "$tool"; done ;;
esac
