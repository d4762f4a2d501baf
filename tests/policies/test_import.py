"""`policies` works where transformers is not installed."""

import subprocess
import sys


def test_transformers_is_never_imported():
    code = (
        "import sys; sys.modules['transformers'] = None; "
        "import policies; policies.make_method('snapkv+ada'); policies.load_policy; "
        "assert not any(name.startswith(('kvp.hf', 'lightning')) for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
