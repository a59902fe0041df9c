run=/slipstream/runs/@{name}
if [ -e "$run/config.toml" ]; then
  set -- --resume "$run"
else
  set -- /etc/slipstream/recipe.toml --out "$run"
fi
exec slipstream launch "$@" --group controller@{remote} --listen "$POD_IP:@{port}"
