"""`policies` works where transformers is not installed."""


def test_transformers_is_never_imported(run_python):
    code = (
        "import sys; sys.modules['transformers'] = None; "
        "import policies; policies.make_method('snapkv+ada'); policies.load_policy; "
        "assert not any(name.startswith(('kvp.hf', 'lightning')) for name in sys.modules)"
    )
    run_python(code)
