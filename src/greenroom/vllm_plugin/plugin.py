"""What vLLM calls in each of its processes."""


def register() -> None:
    """Adds the flags of expert offloading to vLLM. Calling it again changes nothing.

    Nothing else of vLLM differs until an engine is started with them.
    """
    from greenroom.vllm_plugin.arguments import install

    install()
