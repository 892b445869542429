"""What a guarded call costs, beside the bare call and beside other libraries.

Run it with `./dev bench`, or `python -m bench --help`.
"""
