"""x"""

DIRECT = []
